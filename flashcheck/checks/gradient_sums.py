"""Identities of the gradients: sums that are known without knowing any gradient."""

from __future__ import annotations

import torch
from torch import Tensor

from flashcheck.checks.judged import Judged
from flashcheck.checks.record import Record
from flashcheck.checks.registry import check, failed, not_applicable, passed
from flashcheck.checks.relations import agree


def _ready(judged: Judged) -> str:
    """Why the identities do not apply; "" where they do."""
    if judged.kernel.backward is None or not {"dq", "dk", "dv"} <= set(judged.kernel.capabilities.gradients):
        return "no backward with dq, dk and dv is declared"
    if not judged.backward_defined:
        return "the exact forward is not finite"
    if not (judged.problem.num_queries and judged.problem.num_keys):
        return "no pair of a query and a key"
    return ""


def _reach(judged: Judged, name: str) -> Tensor:
    """Largest |stored - exact| of a gradient that its bound allows."""
    interval = judged.backward_bound.tensors[name].interval
    return torch.where(interval.may_overflow, torch.inf, interval.bound)


def _grouped(judged: Judged, x: Tensor) -> Tensor:
    """(B, H, ...) summed over the query heads of each key/value head: (B, Hkv, ...)."""
    return torch.unflatten(x, 1, (judged.problem.num_kv_heads, judged.problem.group)).sum(2)


@check("relation.gradient_sums", faults="ILPV", reruns=3)
def gradient_sums(judged: Judged) -> Record:
    """Columns of dV sum to those of dO; sum V dV = sum O dO; sum Q dQ = sum K dK, for every key/value head.

    The first holds because the weights of a row sum to 1 (less the sink's share), the others because O is
    linear in V and the scores are bilinear in Q and K (Euler). Each within the sum of the bounds of what
    enters it.
    """
    name = "relation.gradient_sums"
    why = _ready(judged)
    if why:
        return not_applicable(name, why)
    p, exact = judged.gradient_problem, judged.exact_gradients
    assert p.dout is not None
    got = {n: judged.gradients[n].double() for n in ("dq", "dk", "dv")}
    reach = {n: _reach(judged, n) for n in got}
    q, k, v, dout = (x.double() for x in (p.q, p.k, p.v, p.dout))
    alive = judged.exact.visible.any(-1)
    # The backward's P sums to exp(LSE - stored LSE): the stored one is a rounded number.
    weights = torch.where(alive, exact.probabilities.sum(-1), 0.0).unsqueeze(-1)
    tiny = 2.0**-40
    expected = _grouped(judged, weights * dout).sum(2) * p.v_descale
    scale = _grouped(judged, weights * dout.abs()).sum(2) * p.v_descale
    fault = _total("column sums of dV", got["dv"].sum(2), expected, reach["dv"].sum(2) + tiny * scale)
    if not fault:
        through = (exact.probabilities @ torch.repeat_interleave(v, p.group, 1)) * p.v_descale
        left, right = (got["dv"] * v).sum((2, 3)), _grouped(judged, through * dout).sum((2, 3))
        size = _grouped(judged, through.abs() * dout.abs()).sum((2, 3))
        room = (reach["dv"] * v.abs()).nan_to_num(torch.inf, torch.inf).sum((2, 3)) + tiny * size
        fault = _total("sum V dV against sum O dO", left, right, room)
    if not fault:
        left, right = _grouped(judged, got["dq"] * q).sum((2, 3)), (got["dk"] * k).sum((2, 3))
        room = _grouped(judged, (reach["dq"] * q.abs()).nan_to_num(torch.inf, torch.inf)).sum((2, 3))
        room = room + (reach["dk"] * k.abs()).nan_to_num(torch.inf, torch.inf).sum((2, 3))
        size = _grouped(judged, (got["dq"] * q).abs()).sum((2, 3)) + (got["dk"] * k).abs().sum((2, 3))
        fault = _total("sum Q dQ against sum K dK", left, right, room + tiny * size)
    if fault and any(m.over for m in judged.measured_gradients.values()):
        return not_applicable(name, "backward.bound rejects the problem itself")
    return failed(name, judged, fault) if fault else passed(name, judged)


def _total(what: str, got: Tensor, expected: Tensor, allowed: Tensor) -> str:
    return agree(what, got, expected, allowed, torch.ones(got.shape, dtype=torch.bool))


@check("relation.score_gradient", faults="ALEV", reruns=4)
def score_gradient(judged: Judged) -> Record:
    """The rows of dS sum to 0, so dQ is 0 where all keys of a head are the same; also sum_j dBias_ij = 0.

    Not with a sink, which takes its share of the sum.
    """
    name = "relation.score_gradient"
    why = _ready(judged)
    if why or judged.problem.sink is not None:
        return not_applicable(name, why or "a sink takes its share of the sum")
    p = judged.gradient_problem
    if p.dlse is not None:
        return not_applicable(name, "a gradient of the LSE enters every sum")
    same = p.replaced(k=p.k[:, :, :1].expand_as(p.k).contiguous())
    other = Judged(judged.kernel, same, str(judged.device))
    if not other.backward_defined:
        return not_applicable(name, "the exact forward is not finite")
    got, interval = other.gradients["dq"].double(), other.backward_bound.tensors["dq"].interval
    # With a softcap all scores of a row share the same derivative only if nothing is added before it.
    allowed = torch.where(interval.may_overflow, torch.inf, interval.bound) + interval.exact.abs()
    live = torch.ones(got.shape, dtype=torch.bool)
    fault = agree("dQ", got, torch.zeros_like(got), allowed, live)
    if fault and any(m.over for m in judged.measured_gradients.values()):
        return not_applicable(name, "backward.bound rejects the problem itself")
    return failed(name, judged, f"equal keys, yet dQ is not 0: {fault}") if fault else passed(name, judged)
