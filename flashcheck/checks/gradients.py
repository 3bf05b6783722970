"""Accuracy of the backward, judged apart from the forward: it is given the oracle's O and LSE."""

from __future__ import annotations

from flashcheck.checks.judged import Judged
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
    worst = [m.worst for m in judged.measured_gradients.values() if m.worst is not None]
    if not worst:
        return not_applicable(name, "no element to judge")
    where = max(worst, key=lambda location: location.margin)
    line = judged.problem.describe()
    if where.margin <= 1:
        return Record(name, Status.PASS, margin=where.margin, where=where, problem=line)
    times = (
        "NaN or inf, or its bound is 0" if where.margin == float("inf") else f"{where.margin:.3g} x its bound"
    )
    over = {t: m.over for t, m in judged.measured_gradients.items() if m.over}
    evidence = tuple(
        f"{tensor}: {count:,} of {judged.measured_gradients[tensor].elements:,} elements over their bound"
        for tensor, count in over.items()
    )
    message = f"{where.tensor} is outside its proved bound: {times}"
    return Record(name, Status.FAIL, message, where.margin, where, evidence, line)
