"""Accuracy against the proved bound."""

from __future__ import annotations

from flashcheck.checks.census import census
from flashcheck.checks.judged import Judged
from flashcheck.checks.picture import error_picture
from flashcheck.checks.record import Record, Status
from flashcheck.checks.registry import check, not_applicable


def inaccurate(judged: Judged) -> bool:
    """Accuracy rejects the problem itself: checks of related problems then leave the verdict to it."""
    return any(m.over for m in judged.measured.values())


@check("forward.bound", faults="ABCDEFHIJKLPQSTVY")
def forward_bound_holds(judged: Judged) -> Record:
    """Every element of O and LSE is a value that the declared arithmetic can produce.

    The acceptance interval of bounds/THEORY.md section 3, ends included; rows that see no key are
    left to special.empty_rows.
    """
    name = "forward.bound"
    worst = [m.worst for m in judged.measured.values() if m.worst is not None]
    if not worst:
        return not_applicable(name, "no row sees a key")
    # A fault of O shows in LSE too more often than not: O speaks first, LSE only where O is right.
    where = next((w for w in worst if w.margin > 1), max(worst, key=lambda location: location.margin))
    line = judged.problem.describe()
    if where.margin <= 1:
        return Record(name, Status.PASS, margin=where.margin, where=where, problem=line)
    times = (
        "NaN or inf, or its bound is 0" if where.margin == float("inf") else f"{where.margin:.3g} x its bound"
    )
    message = f"{where.tensor} is outside its proved bound: {times}"
    evidence = census(judged, where.tensor)
    if where.tensor == "O":
        evidence += error_picture(judged)
    return Record(name, Status.FAIL, message, where.margin, where, evidence, line)
