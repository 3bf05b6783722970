"""Memory of the outputs, the workspaces and the backward: written in full, poisoned around, far apart."""

from __future__ import annotations

from dataclasses import fields

import torch
from torch import Tensor

from flashcheck.checks.bits import differing, first_difference
from flashcheck.checks.exhausted import give_back
from flashcheck.checks.isolation import FINITE_POISON
from flashcheck.checks.judged import Judged, KernelError
from flashcheck.checks.memory import cannot_be_watched, poisoned_allocations
from flashcheck.checks.placement import rearranged
from flashcheck.checks.record import Record
from flashcheck.checks.registry import check, failed, not_applicable, passed
from flashcheck.formats import half_ulp
from flashcheck.inputs.buffers import LAYOUTS, Hosted, far
from flashcheck.problem import Problem

_UNWATCHED = (
    "torch compiles the kernel or calls an operator of higher order: its allocations cannot be filled"
)
_NO_BITS = "the kernel does not declare itself deterministic"


@check("isolation.unwritten", faults="OT", reruns=2)
def unwritten(judged: Judged) -> Record:
    """Fresh memory holds NaN, then a finite number: all outputs are written, no workspace is read before.

    What torch allocates uninitialised while the kernel runs is filled first. Memory that a kernel takes
    from elsewhere, or keeps between calls, is not reached.
    """
    name = "isolation.unwritten"
    if not judged.kernel.capabilities.deterministic:
        return not_applicable(name, _NO_BITS)
    filled = 0
    for value in (torch.nan, FINITE_POISON):
        try:
            with poisoned_allocations(value) as mode:
                got = judged.run()
        except KernelError as error:
            if cannot_be_watched(error):
                return not_applicable(name, _UNWATCHED)
            raise
        filled += mode.filled
        difference = first_difference(judged.result, got)
        if difference:
            return failed(name, judged, f"fresh memory that holds {value} changes the result: {difference}")
    if not filled:
        return not_applicable(name, "the kernel leaves no allocation of torch's uninitialised")
    return passed(name, judged, f"{filled} allocations")


@check("isolation.gradients_unwritten", faults="OX", reruns=8)
def gradients_unwritten(judged: Judged) -> Record:
    """The same of the backward: dQ, dK, dV and its workspaces."""
    name = "isolation.gradients_unwritten"
    why = _no_backward(judged)
    if why:
        return not_applicable(name, why)
    filled = 0
    stored = judged.stored  # of the judge's own work nothing is watched, and nothing done twice
    for value in (torch.nan, FINITE_POISON):
        try:
            with poisoned_allocations(value) as mode:
                got = judged.run_backward(*stored)
        except KernelError as error:
            if cannot_be_watched(error):
                return not_applicable(name, _UNWATCHED)
            raise
        filled += mode.filled
        fault = _differ(got, judged.gradients)
        if fault:
            return failed(name, judged, f"fresh memory that holds {value} changes {fault}")
    if not filled:
        return not_applicable(name, "the kernel leaves no allocation of torch's uninitialised")
    return passed(name, judged, f"{filled} allocations")


def _no_backward(judged: Judged) -> str:
    if judged.kernel.backward is None:
        return "no backward is declared"
    if not judged.kernel.capabilities.deterministic:
        return _NO_BITS
    return "" if judged.backward_defined else "the exact forward is not finite"


def _differ(got: dict[str, Tensor], expected: dict[str, Tensor]) -> str:
    for tensor, x in expected.items():
        bad = differing(got[tensor], x)
        if bool(bad.any()):
            index = tuple(bad.nonzero()[0].tolist())
            return (
                f"{tensor}{list(index)}: {float(got[tensor][index]).hex()} against {float(x[index]).hex()} "
                f"({int(bad.sum()):,} of {bad.numel():,} elements)"
            )
    return ""


@check("isolation.backward", faults="EH", reruns=8)
def backward_isolated(judged: Judged) -> Record:
    """The backward reads dO, O, q, k, v through their strides, and nothing around them; it writes to none.

    Poison around every tensor, first finite, then NaN: bitwise the same gradients, within their bounds.
    dO comes interleaved, and once more expanded from one number, as ``sum().backward()`` makes it.
    """
    name = "isolation.backward"
    why = _no_backward(judged)
    if why:
        return not_applicable(name, why)
    if not judged.kernel.capabilities.any_strides:
        return not_applicable(name, "strides are not declared to be free")
    assert judged.kernel.backward is not None
    p = judged.gradient_problem
    assert p.dout is not None
    out, lse = judged.stored
    layouts = {"q": "padded", "k": "interleaved", "v": "packed", "dout": "interleaved"}
    hosts = {n: LAYOUTS[layout](getattr(p, n)) for n, layout in layouts.items()}
    hosts["out"] = LAYOUTS["padded"](out)
    moved = p.replaced(**{n: hosts[n].view for n in layouts})
    results = []
    for poison in (FINITE_POISON, torch.nan):
        for host in hosts.values():
            host.poison(poison)
        before = {n: host.snapshot() for n, host in hosts.items()}
        results.append(_backward(judged, moved, hosts["out"].view, lse))
        touched = [n for n, host in hosts.items() if not torch.equal(host.snapshot(), before[n])]
        if touched:
            return failed(name, judged, f"the backward wrote into the memory of {', '.join(touched)}")
    fault = _differ(results[1], results[0]) or _outside(judged, results[0])
    if fault:
        return failed(name, judged, f"strides, or poison between them, change {fault}")
    return _expanded(name, judged)


def _backward(judged: Judged, problem: Problem, out: Tensor, lse: Tensor) -> dict[str, Tensor]:
    """The gradients on the CPU; strides survive only where the kernel runs on the CPU or was given them."""
    assert judged.kernel.backward is not None
    device = judged.device
    if device.type != "cpu":
        tensors = {f.name: getattr(problem, f.name) for f in fields(problem)}
        moved = {n: strided_to(x, device) for n, x in tensors.items() if isinstance(x, Tensor)}
        problem, out, lse = problem.replaced(**moved), strided_to(out, device), lse.to(device)
    try:
        raw = judged.kernel.backward(problem, out, lse)
        return {n: x.detach().cpu() for n, x in raw.items() if n in judged.gradients}
    except Exception as error:
        raise KernelError(f"the backward raised {type(error).__name__}: {error}") from error


def strided_to(x: Tensor, device: torch.device) -> Tensor:
    """A copy on ``device`` with the same strides; what is expanded there is expanded here."""
    single = x[tuple(slice(0, 1) if step == 0 else slice(None) for step in x.stride())]
    made = torch.empty_strided(single.shape, single.stride(), dtype=x.dtype, device=device)
    return made.copy_(single).expand(x.shape)


def _outside(judged: Judged, got: dict[str, Tensor]) -> str:
    if any(m.over for m in judged.measured_gradients.values()):
        return ""  # wrong on plain tensors already: backward.bound tells, and strides are not to blame
    for tensor, x in got.items():
        bad = ~judged.backward_bound.tensors[tensor].interval.accepts(x)
        if bool(bad.any()):
            return f"{tensor} in {int(bad.sum()):,} of {bad.numel():,} elements, which leave their bound"
    return ""


def _expanded(name: str, judged: Judged) -> Record:
    """dO with all strides 0 against the same dO written out."""
    p = judged.gradient_problem
    assert p.dout is not None
    one = torch.ones((), dtype=p.dout.dtype).expand(p.dout.shape)
    plain = Judged(judged.kernel, p.replaced(dout=one.contiguous()), str(judged.device))
    got = _backward(judged, p.replaced(dout=one), *judged.stored)
    for tensor, x in plain.gradients.items():
        interval = plain.backward_bound.tensors[tensor].interval
        room = 2 * interval.error + 2 * half_ulp(x.double(), interval.fmt)
        bad = (got[tensor].double() - x.double()).abs() > torch.where(interval.may_overflow, torch.inf, room)
        if bool(bad.any()):
            return failed(
                name, judged, f"dO expanded from one number changes {tensor} ({int(bad.sum()):,} elements)"
            )
    return passed(name, judged, f"layouts of {len(plain.gradients)} gradients")


@check("isolation.wide_strides", faults="GH", reruns=2)
def wide_strides(judged: Judged) -> Record:
    """A tensor whose heads lie 2^31 elements apart is read where its strides say: no offset wraps at 32 bits.

    One key/value head pair of the problem, q, k and v in turn, in memory that is reserved but not touched.
    """
    name = "isolation.wide_strides"
    capabilities, p = judged.kernel.capabilities, judged.problem
    if not (capabilities.any_strides and capabilities.deterministic):
        return not_applicable(name, "strides are not declared to be free, or the bits are not")
    if p.num_kv_heads < 2 or not (p.num_keys and p.num_queries):
        return not_applicable(name, "fewer than two key/value heads")
    small, _ = rearranged(p, torch.zeros(1, dtype=torch.int64), torch.arange(2))
    plain = Judged(judged.kernel, small, str(judged.device))
    expected = plain.result
    for tensor in ("q", "k", "v"):
        try:
            host = far(getattr(small, tensor).to(judged.device))
        except RuntimeError:
            return not_applicable(name, "this machine does not reserve 2^31 elements")
        got = _run_with(plain, tensor, host)
        del host  # gigabytes, on a GPU
        give_back(judged.device)
        live = ~plain.empty_rows
        interval = plain.bound.out.interval
        bad = ~interval.accepts(got) & live.unsqueeze(-1)
        if bool(bad.any()) and bool((interval.accepts(expected.out) | ~live.unsqueeze(-1)).all()):
            return failed(
                name,
                judged,
                f"{tensor} with heads 2^31 elements apart is read elsewhere ({int(bad.sum())} elements)",
            )
    return passed(name, judged, "q, k and v")


def _run_with(plain: Judged, tensor: str, host: Hosted) -> Tensor:
    from flashcheck.checks.judged import on_device

    moved = on_device(plain.problem, plain.device).replaced(**{tensor: host.view})
    try:
        return plain.kernel.forward(moved).out.detach().cpu()
    except Exception as error:
        raise KernelError(f"the kernel raised {type(error).__name__}: {error}") from error
