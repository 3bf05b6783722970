"""The process in which kernels run. It may crash or hang: it is replaced, and says how it died.

A runner is forked from a process that has imported torch but no kernel and touched no GPU, so that a new
one costs milliseconds plus the import of the kernel. It ends by itself when its parent goes away.
"""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from flashcheck.checks import Judged
from flashcheck.errors import ArgumentError
from flashcheck.fuzz.case import FuzzCase, problem_from_json, problem_to_json
from flashcheck.fuzz.groups import Failure, Group
from flashcheck.fuzz.judge import CaseReport, judge_case, with_gradient
from flashcheck.inputs.spec import ProblemSpec
from flashcheck.kernel import Capabilities, Kernel
from flashcheck.problem import Problem

P = ParamSpec("P")
T = TypeVar("T")

DEFAULT_LIMIT = 60.0
"""Seconds for one call of the kernel; a first call on a GPU may have to compile."""

JUDGE_LIMIT = 600.0
"""Seconds for a whole case, beyond which the process is given up: mpmath may need minutes for one row."""

WATCHING = ("isolation.unwritten", "isolation.gradients_unwritten")
"""Checks that watch what a kernel allocates: torch imports its compiler for that, which takes seconds."""

_GRACE = 5.0
_LOAD_LIMIT = 300.0


@dataclass(frozen=True, slots=True)
class Subject:
    """What a runner says of the kernel once it has loaded it."""

    name: str
    capabilities: Capabilities
    has_backward: bool
    has_signature: bool
    versions: str


class KernelLoadError(Exception):
    """The kernel could not be loaded; the message is the loader's."""


class Runner:
    """A kernel in a process of its own; started when first needed.

    Args:
        name: the kernel's, as typed.
        device: where it runs.
        limit: seconds for one call of the kernel; past them the process is ended, and that is a finding. The
            judge's own time does not count.
        log: receives what the kernel prints, and the traceback of a crash.
        method: how its process starts; None: forked where that exists.
        against: name of a second kernel that every case is compared with, or "".
    """

    def __init__(
        self, name: str, device: str, limit: float, log: Path, method: str | None = None, against: str = ""
    ) -> None:
        self.against = against
        self.method = method or ("fork" if hasattr(os, "fork") else "spawn")
        self.name = name
        self.device = device
        self.limit = limit
        self.log = log
        self.restarts = -1
        self._process: Any = None
        self._pipe: Any = None
        self._subject: Subject | None = None
        self._watched = False

    @property
    def subject(self) -> Subject:
        """Loads the kernel where that has not happened; raises KernelLoadError."""
        if self._subject is None:
            self._start()
        assert self._subject is not None
        return self._subject

    def judge(
        self, case: FuzzCase, known: Sequence[Group] = (), candidates: Sequence[Group] = ()
    ) -> CaseReport:
        """The case's report; a crash, or a hang past the limit, is a failure in it."""
        self._watched |= any(name in WATCHING for name in case.checks)
        report: CaseReport = self._ask(("judge", case, tuple(known), tuple(candidates)), self.limit)
        return report

    def gradient(self, case: FuzzCase) -> Problem:
        """The case's problem with the output gradient that its backward checks draw."""
        answer = self._ask(("gradient", case), self.limit)
        return problem_from_json(json.loads(answer)) if isinstance(answer, str) else case.build()

    def script(self, case: FuzzCase, failure: Failure, finding: str) -> str:
        """The text of a stand-alone repro; "" where none can be written."""
        answer = self._ask(("script", case, failure, finding), self.limit)
        return answer if isinstance(answer, str) else ""

    def compile(self, case: FuzzCase) -> float:
        """Calls the kernel (and its backward, where a check asks for it) once; the seconds that took."""
        answer = self._ask(("compile", case), self.limit)
        return answer if isinstance(answer, float) else self.limit

    def signature(self, spec: ProblemSpec) -> str:
        """What the kernel is compiled for, for this problem."""
        answer: str = self._ask(("signature", spec), self.limit)
        return answer

    def close(self) -> None:
        if self._process is None:
            return
        self._pipe.close()  # the child's read ends, and so does it
        self._process.join(_GRACE)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self._process = None

    def _ask(self, request: tuple[Any, ...], limit: float) -> Any:
        if self._process is None:
            self._start()
        try:
            self._pipe.send((limit, request))
            if self._pipe.poll(limit + JUDGE_LIMIT):
                return self._pipe.recv()
            self._process.kill()  # not even SIGALRM ended the call
            died = f"hang: no answer within {limit + JUDGE_LIMIT:g} s"
        except (EOFError, ConnectionError, OSError):
            died = ""
        self._process.join(_GRACE)
        code = self._process.exitcode
        died = died or _death(code, limit)
        self._process = None
        return CaseReport(Failure("crash", "", died, _last_lines(self.log)))

    def _start(self) -> None:
        self.restarts += 1
        if self.restarts and self._watched and self.method == "fork":
            importlib.import_module("torch._dynamo")  # here once, not in every process that replaces this one
        self.log.parent.mkdir(parents=True, exist_ok=True)
        context = multiprocessing.get_context(self.method)
        ours, theirs = context.Pipe()
        # A forked child inherits this side's end too, and must close it.
        arguments = (
            theirs,
            ours if self.method == "fork" else None,
            self.name,
            self.device,
            str(self.log),
            self.against,
        )
        self._process = context.Process(target=_serve, args=arguments)  # type: ignore[attr-defined]
        self._process.start()
        theirs.close()
        self._pipe = ours
        try:
            answer = ours.recv() if ours.poll(_LOAD_LIMIT) else f"not loaded within {_LOAD_LIMIT:g} s"
        except EOFError:
            self._process.join()
            answer = "; ".join(
                (f"loading it ended the process: {_death(self._process.exitcode, 0)}", *_last_lines(self.log))
            )
        if not isinstance(answer, Subject):
            self.close()
            raise KernelLoadError(answer)
        self._subject = answer


def _death(code: int | None, limit: float) -> str:
    if code == -signal.SIGALRM:
        return f"hang: no answer within {limit:g} s"
    if code is not None and code < 0:
        return f"crash: the process was ended by {signal.Signals(-code).name}"
    return f"crash: the process exited with code {code}"


def _last_lines(log: Path) -> tuple[str, ...]:
    """The innermost frames of a fatal error's traceback, else the last lines that were printed."""
    try:
        lines = log.read_text(errors="replace").splitlines()
    except OSError:
        return ()
    for place, line in enumerate(lines):
        if line.startswith("Current thread"):
            return tuple(line.strip() for line in lines[place + 1 : place + 5])
    return tuple(line for line in lines if line.strip())[-4:]


def _serve(
    pipe: Connection, other_end: Connection | None, name: str, device: str, log: str, against: str
) -> None:
    if other_end is not None:
        other_end.close()  # else this process would never see its parent go
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides when to stop
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    sys.stdout = sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    import faulthandler

    faulthandler.enable(file=sys.stderr)
    import torch

    from flashcheck.loading import load

    torch.set_num_threads(1)
    try:
        kernel = load(name)
        other = load(against) if against else None
        if device.startswith("cuda"):  # context and libraries now: the first case's seconds are its own
            torch.ones(16, 16, device=device).mm(torch.ones(16, 16, device=device)).cpu()
    except ArgumentError as error:
        pipe.send(str(error))
        return
    except Exception as error:
        pipe.send(f"{type(error).__name__}: {error}")
        return
    clock = _CallClock()
    kernel = clock.limits(kernel)
    other = None if other is None else clock.limits(other)
    signature_of = kernel.signature
    versions = f"torch {torch.__version__}"
    pipe.send(
        Subject(
            kernel.name, kernel.capabilities, kernel.backward is not None, signature_of is not None, versions
        )
    )
    answers: dict[str, Callable[..., Any]] = {
        "judge": lambda case, known, more: _survivable(judge_case(kernel, case, device, known, other, more)),
        "gradient": lambda case: json.dumps(problem_to_json(with_gradient(case, case.build(), kernel))),
        "script": lambda case, failure, finding: _script(name, kernel, case, failure, device, finding),
        "signature": lambda spec: str(signature_of(spec.outline())) if signature_of else "",
        "compile": lambda case: _call_once(kernel, case, device),
    }
    while True:
        try:
            clock.limit, (what, *arguments) = pipe.recv()
        except (EOFError, OSError):
            os._exit(0)
        pipe.send(answers[what](*arguments))


class _CallClock:
    """Ends the process where one call of a kernel outlasts the limit; the judge takes the time it needs."""

    def __init__(self) -> None:
        self.limit = DEFAULT_LIMIT

    def limits(self, kernel: Kernel) -> Kernel:
        backward = None if kernel.backward is None else self._limited(kernel.backward)
        return replace(kernel, forward=self._limited(kernel.forward), backward=backward)

    def _limited(self, call: Callable[P, T]) -> Callable[P, T]:
        import torch

        def limited(*args: P.args, **kwargs: P.kwargs) -> T:
            # Not a thread: a kernel that hangs may hold the interpreter's lock. SIGALRM ends the process.
            signal.setitimer(signal.ITIMER_REAL, self.limit)
            try:
                result = call(*args, **kwargs)
                if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
                    torch.cuda.synchronize()  # a launch returns at once, and hangs later
                return result
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)

        return limited


def _survivable(report: CaseReport) -> CaseReport:
    """A CUDA error poisons the process: it is told as a crash, and this process ends."""
    import torch

    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        try:
            torch.cuda.synchronize()
        except RuntimeError as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)  # noqa: T201
            time.sleep(0.05)
            os._exit(CUDA_ERROR)
    return report


def _script(name: str, kernel: Kernel, case: FuzzCase, failure: Failure, device: str, finding: str) -> str:
    from flashcheck.fuzz.script import script_of

    return script_of(name, kernel, case, failure, device, finding)


def _call_once(kernel: Kernel, case: FuzzCase, device: str) -> float:
    started = time.perf_counter()
    judged = Judged(kernel, case.build(), device)
    if judged.answers() and case.checks and judged.backward_defined:
        judged.differentiates()
    return time.perf_counter() - started


class InProcessRunner:
    """Answers like a Runner, without a process: for kernels that are known not to crash.

    ``clock``: what the seconds of its reports are read from.
    """

    def __init__(
        self, kernel: Kernel, device: str = "cpu", clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.kernel, self.device, self.clock, self.calls = kernel, device, clock, 0
        self.subject = Subject(kernel.name, kernel.capabilities, kernel.backward is not None, False, "")

    def judge(
        self, case: FuzzCase, known: Sequence[Group] = (), candidates: Sequence[Group] = ()
    ) -> CaseReport:
        self.calls += 1
        return judge_case(self.kernel, case, self.device, known, candidates=candidates, clock=self.clock)

    def gradient(self, case: FuzzCase) -> Problem:
        return with_gradient(case, case.build(), self.kernel)

    def script(self, case: FuzzCase, failure: Failure, finding: str) -> str:
        return _script(self.kernel.name, self.kernel, case, failure, self.device, finding)

    def close(self) -> None:
        pass


CUDA_ERROR = 86
"""Exit code of a runner whose GPU context is broken."""
