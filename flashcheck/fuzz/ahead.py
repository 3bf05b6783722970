"""Compiles ahead: processes that call the kernel once for each signature of a focus that is to come.

What they compile reaches the workers through the compiler's own cache on disk (Triton's, inductor's).
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from flashcheck.fuzz.case import FuzzCase
from flashcheck.fuzz.hunter import Passes
from flashcheck.fuzz.judge import extra_checks
from flashcheck.fuzz.runner import KernelLoadError, Runner
from flashcheck.fuzz.signature import Focus, derived, samples
from flashcheck.fuzz.worker import WorkerTask
from flashcheck.inputs.spec import ProblemSpec

_PATIENCE = 1.0
"""Seconds that helpers have to end by themselves once their pipes are closed."""


@contextlib.contextmanager
def helping(kernel: str, device: str, limit: float, log: Path) -> Iterator[Runner]:
    """The kernel in a process of its own, for a helper process of which nobody waits for an answer: it ends
    without a word where the other end of its pipe goes away, or the kernel cannot be loaded."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # whoever started the helper decides when to stop
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # this process must not touch the GPU
    import torch

    torch.set_num_threads(1)
    runner = Runner(kernel, device, limit, log)
    with contextlib.suppress(EOFError, ConnectionError, KernelLoadError):
        yield runner
    runner.close()


def dismiss(helpers: Sequence[tuple[Any, Connection]]) -> None:
    """Closes the helpers' pipes, which ends them; those that have not ended soon after are killed."""
    for _, pipe in helpers:
        pipe.close()
    until = time.monotonic() + _PATIENCE
    for process, _ in helpers:
        process.join(max(0.0, until - time.monotonic()))
        if process.is_alive():
            process.kill()
            process.join()


@dataclass(frozen=True, slots=True)
class Compiled:
    """What a helper says of a focus: signature -> seconds, over all that it called the kernel for; further
    seconds, of checks that call the kernel in other ways (on other views, with other options)."""

    focus: Focus
    seconds: dict[str, float]
    further: float = 0.0


def compile_foci(task: WorkerTask, passes: Passes, pipe: Connection) -> None:
    """For each (focus, seed) received: a ``Compiled``."""
    log = task.store.folder / "logs" / f"{task.store.run}-{task.worker}.log"
    with helping(task.kernel, task.device, task.limit, log) as runner:
        subject = runner.subject
        backward = subject.has_backward and passes != "forward"
        while True:
            focus, seed = pipe.recv()
            seconds: dict[str, float] = {}
            specs = samples(focus, subject.capabilities, backward, seed)
            for spec in specs:
                case = FuzzCase(spec, ("backward",) if backward else ())
                name = runner.signature(spec) if subject.has_signature else derived(spec, backward)
                if name not in seconds:
                    seconds[name] = runner.compile(case)
            further = _compiled_by_checks(runner, specs[:1]) if passes == "both" else 0.0
            pipe.send(Compiled(focus, seconds, further))


def _compiled_by_checks(runner: Runner, specs: Sequence[ProblemSpec]) -> float:
    """Makes every check that calls the kernel again, once; the seconds that it compiled."""
    checks = dict.fromkeys(extra_checks(kernel_has_backward=False))
    cases = [FuzzCase(spec, names) for spec in specs for names in checks if names]
    return sum(runner.judge(case).seconds.get("compile", 0.0) for case in cases)


class Ahead:
    """The processes, and who compiles what; nothing at all where ``count`` is 0.

    Attributes:
        seconds: of compiling, in all of them; signatures: that were compiled.
    """

    def __init__(self, context: Any, task: WorkerTask, count: int, passes: Passes = "both") -> None:
        self.seconds = 0.0
        self.signatures = 0
        self._waiting: list[tuple[Focus, int]] = []
        self._workers: dict[Connection, tuple[Any, bool]] = {}
        for number in range(count):
            ours, theirs = context.Pipe()
            own = replace(task, worker=f"ahead-{number}")
            process = context.Process(target=compile_foci, args=(own, passes, theirs))
            process.start()
            theirs.close()
            self._workers[ours] = process, False

    def __bool__(self) -> bool:
        """Some helper is alive."""
        return bool(self._workers)

    @property
    def idle(self) -> int:
        """Helpers for whom there is nothing to do."""
        busy = sum(busy for _, busy in self._workers.values()) + len(self._waiting)
        return max(0, len(self._workers) - busy)

    def give(self, focus: Focus, seed: int) -> None:
        """Has it compiled, after what was given before."""
        self._waiting.append((focus, seed))
        self._hand_out()

    def collect(self) -> list[Compiled]:
        """What was compiled since the last time."""
        done: list[Compiled] = []
        for pipe, (process, _) in list(self._workers.items()):
            try:
                while pipe.poll():
                    done.append(pipe.recv())
                    self._workers[pipe] = process, False
            except (EOFError, OSError):  # the kernel ended it, and what it was at is lost: workers meet it
                dismiss([(process, pipe)])
                del self._workers[pipe]
        for one in done:
            self.signatures += len(one.seconds)
            self.seconds += sum(one.seconds.values()) + one.further
        self._hand_out()
        return done

    def _hand_out(self) -> None:
        for pipe, (process, busy) in self._workers.items():
            if self._waiting and not busy:
                with contextlib.suppress(OSError):  # seen to when it is collected
                    pipe.send(self._waiting.pop(0))
                self._workers[pipe] = process, True

    def close(self) -> None:
        self.collect()
        dismiss([(process, pipe) for pipe, (process, _) in self._workers.items()])
