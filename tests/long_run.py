"""A count over thousands of problems that can be stopped at any moment and goes on where it ended."""

from __future__ import annotations

import json
import signal
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from flashcheck.devices import device_lost
from flashcheck.files import write_atomically
from flashcheck.report.build import versions

_SAVE_EVERY = 20.0  # seconds


def spread_out(parts: dict[str, int]) -> list[str]:
    """Kernel names, each as often as its share, mixed."""
    slots = [((n + 0.5) / share, name) for name, share in parts.items() for n in range(share)]
    return [name for _, name in sorted(slots)]


def tally_from(kind: type, data: dict[str, Any]) -> Any:
    """A tally as ``dataclasses.asdict`` and JSON left it."""
    return kind(**{key: tuple(value) if isinstance(value, list) else value for key, value in data.items()})


class LongRun(ABC):
    """Cases 0, 1, ... over kernels by share; ``path`` holds the state.

    Deterministic in (parts, seed): a case is the same problem for the same kernel in every run.

    Attributes:
        done: cases judged. seconds, wall: process CPU time and wall time that they took.
    """

    def __init__(self, parts: dict[str, int], seed: int, path: Path | None) -> None:
        self.parts, self.seed, self.path = parts, seed, path
        self.order = spread_out(parts)
        self.done, self.seconds, self.wall = 0, 0.0, 0.0
        if path is not None and path.exists():
            self._resume(json.loads(path.read_text()))

    @abstractmethod
    def case(self, number: int) -> None:
        """Judges one."""

    @abstractmethod
    def state(self) -> dict[str, Any]:
        """What has been found, for the file."""

    @abstractmethod
    def restore(self, data: dict[str, Any]) -> None:
        """From what ``state`` gave."""

    @abstractmethod
    def fault(self, number: int, words: str) -> None:
        """Takes note of what was no verdict on case ``number``."""

    @abstractmethod
    def worst(self) -> str:
        """A few words on what has been found."""

    def _resume(self, data: dict[str, Any]) -> None:
        if (data["parts"], data["seed"], data["versions"]) != (self.parts, self.seed, versions()):
            sys.exit(f"{self.path} is of another run (kernels, seed or versions differ): give another --json")
        self.done, self.seconds, self.wall = data["done"], data["seconds"], data["wall_seconds"]
        self.restore(data)

    def save(self) -> None:
        """Writes the state, if there is a file for it."""
        if self.path is None:
            return
        data = {
            "parts": self.parts,
            "seed": self.seed,
            "versions": versions(),
            "date": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "done": self.done,
            "seconds": round(self.seconds, 1),
            "wall_seconds": round(self.wall, 1),
            **self.state(),
        }
        write_atomically(self.path, json.dumps(data, indent=1))

    def go(self, cases: int) -> None:
        """Judges cases until ``cases`` are done. Ctrl-C ends it after the case in flight, a second one in the
        middle of it; what is done is saved."""
        cpu, wall = time.process_time() - self.seconds, time.perf_counter() - self.wall
        saved = time.perf_counter()
        with _interrupts() as interrupted:
            while self.done < cases and not interrupted:
                self.case(self.done)
                self.done += 1
                self.seconds, self.wall = time.process_time() - cpu, time.perf_counter() - wall
                if device_lost():
                    self.fault(self.done - 1, "the GPU is lost to this process")
                    break
                if time.perf_counter() - saved > _SAVE_EVERY:
                    saved = time.perf_counter()
                    self.save()
                    rate = 1e3 * self.seconds / self.done
                    line = f"{self.done:,} of {cases:,}, {rate:.0f} ms a case, {self.worst()}"
                    print(line, file=sys.stderr, flush=True)
        self.save()


@contextmanager
def _interrupts() -> Iterator[list[int]]:
    """Collects Ctrl-C; from the second on it is raised."""
    seen: list[int] = []

    def handle(number: int, _: object) -> None:
        if seen:
            raise KeyboardInterrupt
        seen.append(number)
        print("stopping after this case", file=sys.stderr, flush=True)

    before = signal.signal(signal.SIGINT, handle)
    try:
        yield seen
    finally:
        signal.signal(signal.SIGINT, before)
