"""Compiles a plan ahead of its judge, in other processes; the compiler's cache on disk carries it over.

On a GPU a problem of its own options and shapes costs seconds of compilation on one core, and is judged in
a fraction of that. Helpers take the plan's problems in its order and call the kernel as the judge will. What
goes wrong there is nobody's news: the judge meets it himself.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import tempfile
import threading
from collections.abc import Sequence
from multiprocessing import connection
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from flashcheck.checks import CHECKS
from flashcheck.fuzz.ahead import dismiss, helping
from flashcheck.fuzz.case import FuzzCase
from flashcheck.fuzz.runner import DEFAULT_LIMIT, Runner
from flashcheck.plan import Case

SLOW = 0.3
"""Seconds of a call, not the first of its process, that something was compiled in: the rest of the helpers
are started. A kernel that is never compiled keeps a single one."""

_NOT_AHEAD = ("state.fresh_process",)
"""Checks that are not made ahead: this one starts processes itself."""
_POLL = 0.2


def default_helpers(device: str) -> int:
    """How many helpers a user expects: on a GPU all cores but two, none elsewhere."""
    return max(0, (os.cpu_count() or 1) - 2) if device.startswith("cuda") else 0


class CompilingAhead:
    """Context manager: compiles ``cases`` for the named kernel while it is open.

    Args:
        kernel: its name: helpers load it themselves.
        count: at most so many helpers; 0: nothing happens.
        slow: see ``SLOW``.

    Attributes:
        compiled: problems that helpers are done with.
    """

    def __init__(
        self, kernel: str, device: str, cases: Sequence[Case], count: int, slow: float = SLOW
    ) -> None:
        self.kernel, self.device, self.count, self.slow = kernel, device, count, slow
        self.compiled = 0
        self._open = list(reversed(cases))
        self._judged: set[Case] = set()
        self._helpers: dict[Connection, Any] = {}
        self._calls: dict[Connection, int] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._folder = tempfile.TemporaryDirectory(prefix="flashcheck-ahead-")

    def __enter__(self) -> Self:
        if self.count > 0:
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()
        dismiss([(process, pipe) for pipe, process in self._helpers.items()])
        self._folder.cleanup()

    def judged(self, case: Case) -> None:
        """The judge is done with this case: it need not be compiled any more."""
        self._judged.add(case)

    def describe(self) -> str:
        """For the line that shows progress; "" where nothing is compiled."""
        return f"compiling ahead, {self.compiled} done" if self._helpers else ""

    def _run(self) -> None:
        self._start()
        while self._helpers and not self._stop.is_set():
            for pipe in connection.wait(list(self._helpers), timeout=_POLL):
                assert isinstance(pipe, Connection)
                try:
                    self._heard(pipe, pipe.recv())
                except (EOFError, OSError):  # that helper died; the others go on
                    dismiss([(self._helpers.pop(pipe), pipe)])

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        log = Path(self._folder.name) / f"{len(self._helpers)}.log"
        process = context.Process(target=compile_cases, args=(self.kernel, self.device, log, theirs))
        process.start()
        theirs.close()
        self._helpers[ours], self._calls[ours] = process, 0

    def _heard(self, pipe: Connection, seconds: float | None) -> None:
        """``seconds``: what its last case took; None: it is ready for the first."""
        if seconds is not None:
            self.compiled += 1
            self._calls[pipe] += 1
            if self._calls[pipe] > 1 and seconds > self.slow:
                for _ in range(min(self.count - len(self._helpers), len(self._open))):
                    self._start()
        case = self._next()
        if case is None:
            dismiss([(self._helpers.pop(pipe), pipe)])
        else:
            pipe.send(case)

    def _next(self) -> Case | None:
        while self._open:
            case = self._open.pop()
            if case not in self._judged:
                return case
        return None


def compile_cases(kernel: str, device: str, log: Path, pipe: Connection) -> None:
    """A helper: sends None when it is ready, and for each case received the seconds it took."""
    with helping(kernel, device, DEFAULT_LIMIT, log) as runner:
        backward = runner.subject.has_backward
        pipe.send(None)
        while True:
            pipe.send(_compile(runner, pipe.recv(), backward))
    with contextlib.suppress(OSError):
        pipe.close()


def _compile(runner: Runner, case: Case, backward: bool) -> float:
    """Calls the kernel on the problem, and makes the checks that call it again in other ways."""
    asked = backward and any(name.startswith("backward") for name in case.checks)
    seconds = runner.compile(FuzzCase(case.spec, ("backward",) if asked else ()))
    further = tuple(n for n in case.checks if CHECKS[n].reruns and n not in _NOT_AHEAD)
    if further:
        spent = runner.judge(FuzzCase(case.spec, further)).seconds
        seconds += spent.get("kernel", 0.0) + spent.get("compile", 0.0)
    return seconds
