"""Accuracy of the backward: judged apart from the forward, on the kernel's own forward, and end to end."""

from __future__ import annotations

from flashcheck.checks.judged import Judged
from flashcheck.checks.measure import Measured
from flashcheck.checks.record import Record, Status
from flashcheck.checks.registry import check, not_applicable


@check("backward.bound", faults="ACDEFHIJKLPSV")
def backward_bound_holds(judged: Judged) -> Record:
    """Every element of dQ, dK, dV (and of the gradients of bias and sink) is a value that the declared
    arithmetic can produce.

    The backward gets dO, and O and LSE as the oracle's values rounded to the kernel's formats, so that a
    fault of the forward neither hides nor excuses one here (bounds/THEORY.md section 4).
    """
    name = "backward.bound"
    if judged.kernel.backward is None:
        return not_applicable(name, "no backward is declared")
    if not judged.backward_defined:
        return not_applicable(name, "the exact forward is not finite")
    return _record(name, judged, judged.measured_gradients)


@check("backward.own_forward", faults="ACDEJPX", reruns=3)
def backward_of_own_forward(judged: Judged) -> Record:
    """The gradients that the backward makes of the kernel's own O and LSE are those of that O and LSE.

    The oracle reads the same stored values, so that errors of the forward do not count (bounds/THEORY.md
    section 4): what is left is how the two passes of the kernel fit together.
    """
    return _of_own_forward("backward.own_forward", judged, end_to_end=False)


@check("backward.end_to_end", faults="ACDEJPX", reruns=3)
def backward_end_to_end(judged: Judged) -> Record:
    """The gradients that the backward makes of the kernel's own forward are near the exact ones.

    Nothing is conditional: the exact gradients are computed from scratch, and the proved errors of O and
    LSE are carried through the backward's bound (bounds/THEORY.md section 4.4).
    """
    return _of_own_forward("backward.end_to_end", judged, end_to_end=True)


def _of_own_forward(name: str, judged: Judged, *, end_to_end: bool) -> Record:
    if judged.kernel.backward is None:
        return not_applicable(name, "no backward is declared")
    if judged.own_forward is None:
        return not_applicable(name, "the kernel has no finite forward that its backward reads")
    return _record(name, judged, judged.measure_own(end_to_end=end_to_end))


def _record(name: str, judged: Judged, measured: dict[str, Measured]) -> Record:
    """Pass, or fail at the worst element of any gradient."""
    worst = [m.worst for m in measured.values() if m.worst is not None]
    if not worst:
        return not_applicable(name, "no element to judge")
    where = max(worst, key=lambda location: location.margin)
    line = judged.problem.describe()
    if where.margin <= 1:
        return Record(name, Status.PASS, margin=where.margin, where=where, problem=line)
    times = (
        "NaN or inf, or its bound is 0" if where.margin == float("inf") else f"{where.margin:.3g} x its bound"
    )
    evidence = tuple(
        f"{tensor}: {m.over:,} of {m.elements:,} elements over their bound"
        for tensor, m in measured.items()
        if m.over
    )
    message = f"{where.tensor} is outside its proved bound: {times}"
    return Record(name, Status.FAIL, message, where.margin, where, evidence, line)
