"""Memory around the data: it must not matter and must not change."""

from __future__ import annotations

from flashcheck.checks.bits import first_difference
from flashcheck.checks.judged import Judged
from flashcheck.checks.measure import measure
from flashcheck.checks.record import Record, Status
from flashcheck.checks.registry import check
from flashcheck.inputs.buffers import LAYOUTS, hosted
from flashcheck.kernel import ForwardResult


@check("isolation.buffers", reruns=len(LAYOUTS))
def isolation_buffers(judged: Judged) -> Record:
    """NaN around the tensors and between their strides changes nothing, and stays as it was.

    A contiguous view inside a poisoned allocation must give bitwise the same result. Other strides may
    lead a kernel to another order of summation: their result must obey the bound. Nothing in the
    allocations, the inputs included, may be written (contract, point 6).
    """
    name = "isolation.buffers"
    line = judged.problem.describe()
    layouts = tuple(LAYOUTS) if judged.kernel.capabilities.any_strides else ("guarded",)
    for layout in layouts:
        problem, hosts = hosted(judged.problem, layout)
        result = judged.run(problem)
        touched = [n for n, host in zip("qkv", hosts, strict=True) if not host.intact()]
        if touched:
            message = f"the kernel wrote into the memory of {', '.join(touched)} (layout {layout})"
            return Record(name, Status.FAIL, message, problem=line)
        difference = first_difference(judged.result, result)
        if difference is None or (layout != "guarded" and _obeys(judged, result)):
            continue
        message = f"poison outside the data changes the result (layout {layout}): {difference}"
        return Record(name, Status.FAIL, message, problem=line)
    return Record(name, Status.PASS, f"layouts {', '.join(layouts)}", problem=line)


def _obeys(judged: Judged, result: ForwardResult) -> bool:
    live = ~judged.empty_rows
    if measure("O", result.out, judged.bound.out, live).over:
        return False
    return result.lse is None or not measure("LSE", result.lse, judged.bound.lse, live).over
