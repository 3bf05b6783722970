"""A case in, a report out: builds the problem, runs the kernel, makes the checks, times each part."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from flashcheck.bits import bytes_of
from flashcheck.checks import CHECKS, Judged, JudgeError, Record
from flashcheck.checks.diagnose import (
    MOST_GUESSES,
    allowed_classes,
    backward_classes,
    filled_rows,
    forward_classes,
)
from flashcheck.checks.diagnose_backward import allowed_gradients
from flashcheck.checks.rms import RmsTally
from flashcheck.fuzz.against import compared
from flashcheck.fuzz.case import FuzzCase
from flashcheck.fuzz.groups import Failure, Group, group_of
from flashcheck.fuzz.looks import NOT_A_NUMBER, is_strong, looks_of
from flashcheck.fuzz.signature import SLOW
from flashcheck.fuzz.statistics import GROUP_CHECKS, SUMS, statistics_of
from flashcheck.inputs.coverage import covered
from flashcheck.inputs.values import FAMILIES
from flashcheck.kernel import Kernel, default_arithmetic
from flashcheck.problem import Problem
from flashcheck.reruns import ALTERNATE, EVERY, ONCE

ORDINARY = "normal"
"""The family of values on which a fault shows best."""


def forward_checks() -> tuple[str, ...]:
    """Checks of the forward that plans make on every problem: made on every case."""
    dear = {*EVERY, *ONCE, *ALTERNATE, *GROUP_CHECKS}
    return tuple(
        n for n, c in CHECKS.items() if not c.reruns and not n.startswith("backward") and n not in dear
    )


def extra_checks(kernel_has_backward: bool) -> tuple[tuple[str, ...], ...]:
    """What a case may be judged on besides: one check that runs the kernel or the oracle again, or the
    backward's.

    Each is drawn as often as any other, the backward's one time in four.
    """
    reruns = [(n,) for n, c in CHECKS.items() if (c.reruns or n in EVERY) and n not in ONCE]
    backward = [backward_checks()] * (len(reruns) // 3) if kernel_has_backward else []
    return ((), *backward, *reruns)


def backward_checks() -> tuple[str, ...]:
    """Checks of the backward that share one run of it, the strongest statement first."""
    names = [
        n for n, c in CHECKS.items() if n.startswith("backward") and not c.reruns and n not in GROUP_CHECKS
    ]
    return tuple(sorted(names, key=lambda name: name != "backward.bound"))


@dataclass(frozen=True, slots=True)
class CaseReport:
    """What became of one case; plain data.

    Attributes:
        failure: the first failure that belongs to no known group, or None.
        masked: ids of the known groups that it failed in.
        margins: tensor -> worst margin; rms: tensor -> measured / predicted, on ordinary values.
        covered: labels of the declaration that it covers.
        seconds: build, first (first kernel call), kernel (further calls), judge; on a GPU also compile (calls
            that were too slow for anything else).
        judge_fault: the judge's own failure, or "".
        against: tensor -> what ``against.compared`` says of the other kernel.
        statistics: tensor -> sums for the checks that judge many problems together, where ``SUMS`` is among
            the case's checks.
    """

    failure: Failure | None = None
    masked: tuple[str, ...] = ()
    margins: dict[str, float] = field(default_factory=dict)
    rms: dict[str, float] = field(default_factory=dict)
    covered: tuple[str, ...] = ()
    seconds: dict[str, float] = field(default_factory=dict)
    judge_fault: str = ""
    against: dict[str, tuple[float, float, float]] = field(default_factory=dict)
    statistics: dict[str, dict[str, Any]] = field(default_factory=dict)


@dataclass(slots=True)
class _Spent:
    """Time inside the kernel, first call apart."""

    clock: Callable[[], float]
    slow: float
    first: float = 0.0
    further: float = 0.0
    compiling: float = 0.0
    calls: int = 0

    def around(self, function: Any) -> Any:
        def timed(*arguments: Any) -> Any:
            started = self.clock()
            try:
                return function(*arguments)
            finally:
                spent = self.clock() - started
                self.calls += 1
                if spent > self.slow:
                    self.compiling += spent
                elif self.calls == 1:
                    self.first = spent
                else:
                    self.further += spent

        return timed


def judge_case(
    kernel: Kernel,
    case: FuzzCase,
    device: str = "cpu",
    known: Sequence[Group] = (),
    other: Kernel | None = None,
    candidates: Sequence[Group] = (),
    clock: Callable[[], float] = time.perf_counter,
) -> CaseReport:
    """Judges one case; never raises for a fault of the kernel or of the judge.

    Args:
        known: groups whose failures are counted and go by.
        candidates: further groups whose classes of fault are tried on a failure.
        other: a kernel to compare with.
        clock: what seconds are read from.
    """
    started = clock()
    problem = case.build()
    built = clock() - started
    spent = _Spent(clock, SLOW if device.startswith("cuda") else math.inf)
    backward = None if kernel.backward is None else spent.around(kernel.backward)
    timed = replace(kernel, forward=spent.around(kernel.forward), backward=backward)
    judged = Judged(timed, problem, device)
    try:
        report = _judge(judged, case, known, candidates)
        if other is not None and report.failure is None and not report.masked:
            report = replace(report, against=compared(judged, other))
    except JudgeError as error:
        report = CaseReport(judge_fault=str(error))
    except Exception as error:  # the kernel's own exceptions are KernelErrors: this one is the judge's
        report = CaseReport(judge_fault=f"{type(error).__name__} on {problem.describe()}: {error}")
    whole = clock() - started
    seconds = {"build": built, "first": spent.first, "kernel": spent.further}
    seconds |= {"compile": spent.compiling} if spent.compiling else {}
    seconds["judge"] = max(0.0, whole - sum(seconds.values()))
    return replace(report, seconds={name: round(s, 6) for name, s in seconds.items()})


OF_OWN_FORWARD = ("backward.own_forward", "backward.end_to_end")
"""Checks of the backward in which errors of the kernel's forward take part."""


def _judge(judged: Judged, case: FuzzCase, known: Sequence[Group], candidates: Sequence[Group]) -> CaseReport:
    failure: Failure | None = None
    masked: list[str] = []
    alone = tuple(name for name in case.checks if name != SUMS)
    names = alone if judged.answers() else ("forward.bound",)
    forward_is_wrong = lse_is_wrong = backward_is_wrong = False
    for name in names:
        backward = name.startswith("backward")
        own = name in OF_OWN_FORWARD
        # A consequence of what failed before; most of the backward is judged on the oracle's O and LSE.
        if (backward_is_wrong and backward) or (forward_is_wrong and (own or not backward)):
            continue
        if lse_is_wrong and own:
            continue
        record = CHECKS[name].on(judged)
        if not record.failed:
            continue
        of_lse = record.message.startswith("LSE ")
        if of_lse and lse_is_wrong:
            continue
        # A wrong LSE alone leaves O to be judged.
        lse_is_wrong |= of_lse
        backward_is_wrong |= backward
        forward_is_wrong |= not backward and not of_lse
        found = _failure(judged, record, case, (*known, *candidates))
        group = group_of(found, [g for g in known if not g.yields_to(found)])
        if group not in known:
            failure = found
            break
        masked.append(group.id)
    if not judged.answers():
        return CaseReport(failure, tuple(masked))
    backward = any(name.startswith("backward") for name in alone)
    margins, rms = _numbers(judged, case, backward)
    labels = tuple(sorted(covered(case.spec, judged.problem))) if case.tensors is None else ()
    sums = {}
    if len(alone) < len(case.checks):
        sums = statistics_of(judged, backward)
    return CaseReport(failure, tuple(masked), margins, rms, labels, statistics=sums)


def _failure(judged: Judged, record: Record, case: FuzzCase, groups: Sequence[Group]) -> Failure:
    where = record.where
    faults = _proved(judged, record)
    looks = looks_of(judged, record)
    known = {c for g in groups for c in g.classes}
    if record.check in VALUE_CHECKS and not known & set(faults):
        faults |= allowed_classes(judged, sorted(known))
    differentiated = judged.backward_defined and where is not None
    if record.check.startswith("backward") and differentiated and not known & set(faults):
        faults |= allowed_gradients(judged, known) or _gradients_of_ordinary_values(judged, case, looks)
    if record.check in VALUE_CHECKS and not faults:
        faults, more = _on_ordinary_values(judged, case)
        looks += tuple(x for x in more if x not in looks)
    if faults and is_strong(judged, record, faults):
        looks = ()
    return Failure(
        check=record.check,
        tensor=where.tensor if where is not None else "",
        message=record.message,
        evidence=(*record.evidence, *_undeclared(judged, record)),
        where=where.describe() if where is not None else "",
        guesses=tuple(faults.values())[:MOST_GUESSES],
        faults=tuple(faults),
        looks=looks,
        margin=record.margin,
        digest=digest_of(judged) if judged.answers() else "",
    )


def _undeclared(judged: Judged, record: Record) -> tuple[str, ...]:
    """What a bound rests on where the kernel declares nothing of its arithmetic: the fault may lie there."""
    if judged.kernel.arithmetic is not default_arithmetic or not record.check.endswith(".bound"):
        return ()
    name = judged.problem.format.name
    usual = f"rounds P to {name} and divides by the row sum at the end"
    return (f"its arithmetic is not declared: taken for one that {usual}",)


VALUE_CHECKS = (
    "forward.bound",
    "forward.algorithm",
    *(n for n in CHECKS if n.startswith("relation.") and "gradient" not in n),
    "special.nonfinite",
    "special.no_silent_overflow",
    "influence.forward",
    "influence.perturbed",
    "bitwise.suffix",
)
"""Checks that fail where O or LSE follow another rule, of which keys are seen among them."""


def _proved(judged: Judged, record: Record) -> dict[str, str]:
    """Class of fault -> explanation, for the failed check."""
    if record.check == "special.empty_rows":
        return filled_rows(judged)
    if record.check == "forward.bound" and record.where is not None:
        return forward_classes(judged)
    if record.check.startswith("backward") and record.where is not None:
        return backward_classes(judged)
    return {}


def _on_ordinary_values(judged: Judged, case: FuzzCase) -> tuple[dict[str, str], tuple[str, ...]]:
    """Classes proved on the same problem with ordinary values, where the output here allows them too; and
    what the failure there looks like.

    Some values tell no fault from another: all subnormals are a few units apart. What O contradicts here
    is not told, so that a second fault, of these values alone, stays a finding of its own.
    """
    if case.tensors is not None or case.spec.family == ORDINARY:
        return {}, ()
    problem = replace(case.spec, family=ORDINARY).build()
    ordinary = Judged(judged.kernel, problem, str(judged.device))
    if not ordinary.answers():
        return {}, ()
    record = CHECKS["forward.bound"].on(ordinary)
    if not record.failed:
        return {}, ()
    proved = forward_classes(ordinary)
    return allowed_classes(judged, proved), () if proved else looks_of(ordinary, record)


def _gradients_of_ordinary_values(judged: Judged, case: FuzzCase, looks: tuple[str, ...]) -> dict[str, str]:
    """Classes of the backward on the same problem with ordinary values, where what is wrong here is wrong
    there too."""
    if case.tensors is not None or case.spec.family == ORDINARY == case.spec.gradient:
        return {}
    problem = replace(case.spec, family=ORDINARY, gradient=ORDINARY).build()
    ordinary = Judged(judged.kernel, problem, str(judged.device))
    if not ordinary.answers():
        return {}
    record = CHECKS["backward.bound"].on(ordinary)
    if not record.failed or record.where is None:
        return {}
    same = set(looks) - {NOT_A_NUMBER} <= set(looks_of(ordinary, record))
    return backward_classes(ordinary) if same else {}


def _numbers(judged: Judged, case: FuzzCase, backward: bool) -> tuple[dict[str, float], dict[str, float]]:
    measured = dict(judged.measured)
    if backward and judged.backward_defined and judged.differentiates():
        measured |= judged.measured_gradients
    margins = {t: m.worst.margin for t, m in measured.items() if m.worst is not None}
    rms = {}
    if "ordinary" in FAMILIES[case.spec.family].properties:
        for tensor, m in measured.items():
            tally = RmsTally()
            if m.gates:
                tally.add(m)
            if tally.ratio is not None:
                rms[tensor] = tally.ratio
    return margins, rms


def digest_of(judged: Judged) -> str:
    """Of the bits of O, LSE and whatever gradients were computed."""
    tensors: list[Tensor | None] = [judged.result.out, judged.result.lse]
    if "gradients" in judged.__dict__:  # computed already
        tensors += [judged.gradients[name] for name in sorted(judged.gradients)]
    digest = hashlib.sha256()
    for x in tensors:
        if x is not None:
            digest.update(bytes_of(x))
    return digest.hexdigest()[:16]


def with_gradient(case: FuzzCase, problem: Problem, kernel: Kernel) -> Problem:
    """The problem with the output gradient that a backward check draws, so that it can be reduced."""
    if problem.dout is not None or not any(n.startswith("backward") for n in case.checks):
        return problem
    return Judged(kernel, problem).gradient_problem
