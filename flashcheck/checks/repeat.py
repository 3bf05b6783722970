"""The same call again."""

from __future__ import annotations

from flashcheck.checks.bits import first_difference
from flashcheck.checks.judged import Judged
from flashcheck.checks.record import Record, Status
from flashcheck.checks.registry import check, not_applicable


@check("bitwise.repeat", faults="NX", reruns=1)
def bitwise_repeat(judged: Judged) -> Record:
    """The same inputs on the same machine give bitwise the same result (contract, point 8)."""
    name = "bitwise.repeat"
    if not judged.kernel.capabilities.deterministic:
        return not_applicable(name, "the kernel does not declare itself deterministic")
    line = judged.problem.describe()
    difference = first_difference(judged.result, judged.run())
    if difference is None:
        return Record(name, Status.PASS, problem=line)
    return Record(name, Status.FAIL, f"a second call gave another result: {difference}", problem=line)
