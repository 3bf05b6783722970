"""Memory around the data: it must not matter and must not change."""

from __future__ import annotations

import torch

from flashcheck.checks.bits import first_difference
from flashcheck.checks.judged import Judged
from flashcheck.checks.measure import measure
from flashcheck.checks.record import Record, Status
from flashcheck.checks.registry import check
from flashcheck.inputs.buffers import Hosted, hosted
from flashcheck.kernel import ForwardResult
from flashcheck.problem import Problem

FINITE_POISON = 240.0
"""Large against unit data, exact in every format, and inside the range of each."""


@check("isolation.buffers", faults="EHU", reruns=4)
def isolation_buffers(judged: Judged) -> Record:
    """Poison around the tensors and between their strides changes no bit, and stays as it was.

    The kernel runs twice on the same views inside the same allocations: first with a large finite number
    around the data (a guard against NaN would hide the fault), then with NaN. Both results must agree in
    every bit, the first must obey the bound (other strides may mean another order of summation), and
    nothing in the allocations, the inputs included, may be written (contract, point 6). Masks and biases
    lie in such memory too, and keys past ``key_lengths`` are poisoned like what lies around the tensors.
    """
    name = "isolation.buffers"
    line = judged.problem.describe()
    layouts = ("padded", "interleaved") if judged.kernel.capabilities.any_strides else ("guarded",)
    for layout in layouts:
        problem, hosts = hosted(judged.problem, layout)
        fault = _fault(judged, problem, list(hosts.values()), tuple(hosts))
        if fault:
            return Record(name, Status.FAIL, f"{fault} (layout {layout})", problem=line)
    return Record(name, Status.PASS, f"layouts {', '.join(layouts)}", problem=line)


def _fault(judged: Judged, problem: Problem, hosts: list[Hosted], names: tuple[str, ...]) -> str:
    _poison(problem, hosts, FINITE_POISON)
    finite = judged.run(problem)
    over = _outside_bound(judged, finite)
    if over:
        return f"other strides, or finite numbers between them, change the result: {over}"
    _poison(problem, hosts, torch.nan)
    before = [host.snapshot() for host in hosts]
    poisoned = judged.run(problem)
    touched = [
        name
        for name, host, bits in zip(names, hosts, before, strict=True)
        if not torch.equal(host.snapshot(), bits)
    ]
    if touched:
        return f"the kernel wrote into the memory of {', '.join(touched)}"
    if not judged.kernel.capabilities.deterministic:
        over = _outside_bound(judged, poisoned)
        return f"poison outside the data changes the result: {over}" if over else ""
    difference = first_difference(finite, poisoned)
    return f"poison outside the data changes the result: {difference}" if difference else ""


def _poison(problem: Problem, hosts: list[Hosted], value: float) -> None:
    for host in hosts:
        host.poison(value)
    if problem.key_lengths is not None:
        padding = torch.arange(problem.num_keys) >= problem.key_lengths.unsqueeze(-1)
        for x in (problem.k, problem.v):
            # torch fills no 8-bit tensor through a mask.
            x.copy_(torch.where(padding[:, None, :, None], torch.full((), value, dtype=x.dtype), x))


def _outside_bound(judged: Judged, result: ForwardResult) -> str:
    if any(m.over for m in judged.measured.values()):
        return ""  # wrong on plain tensors already: forward.bound tells, and strides are not to blame
    live = ~judged.empty_rows
    tensors = [measure("O", result.out, judged.bound.out, live)]
    if result.lse is not None:
        tensors.append(measure("LSE", result.lse, judged.bound.lse, live))
    for measured in tensors:
        if measured.over and measured.worst is not None:
            return measured.worst.describe()
    return ""
