"""Analytic relations between two runs of the kernel: exact in real numbers, within both bounds in fp.

None of them compares with the oracle's output, so a mistake that oracle and kernel share cannot hide here;
the bounds alone enter.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flashcheck.bounds.interval import Interval
from flashcheck.checks.accuracy import inaccurate
from flashcheck.checks.judged import Judged
from flashcheck.checks.record import Record
from flashcheck.checks.registry import check, failed, not_applicable, passed
from flashcheck.formats import half_ulp
from flashcheck.operands import same_scales
from flashcheck.problem import Problem

_POSITIONAL = ("causal", "window", "alibi_slopes", "cu_seqlens", "key_lengths")
"""Options that give the position of a key a meaning."""


def _allowed(interval: Interval) -> Tensor:
    """|stored - exact| that the bound allows; the final rounding included, inf where anything goes."""
    size = interval.exact.abs().nan_to_num(0.0, 0.0, 0.0)
    reach = interval.error + half_ulp(size + interval.error.nan_to_num(0.0, 0.0, 0.0), interval.fmt)
    return torch.where(interval.may_overflow | ~torch.isfinite(interval.exact), torch.inf, reach)


def agree(tensor: str, got: Tensor, expected: Tensor, allowed: Tensor, live: Tensor) -> str:
    """Where |got - expected| exceeds ``allowed`` or is NaN, in words; "" for nowhere."""
    got, expected = got.double(), expected.double()
    bad = live & torch.isfinite(allowed) & (got != expected) & ~((got - expected).abs() <= allowed)
    if not bool(bad.any()):
        return ""
    index = tuple(bad.nonzero()[0].tolist())
    return (
        f"{tensor}[{','.join(map(str, index))}] is {float(got[index])!r} against {float(expected[index])!r}, "
        f"allowed difference {float(allowed[index]):.3g} ({int(bad.sum()):,} of {bad.numel():,} elements)"
    )


def same_answer(judged: Judged, other: Judged, shift: float = 0.0) -> str:
    """The fault of two runs whose exact O is equal and whose exact LSE differs by ``shift``."""
    live = ~judged.empty_rows
    allowed = _allowed(judged.bound.out.interval) + _allowed(other.bound.out.interval)
    rows = live.unsqueeze(-1).expand_as(allowed)
    fault = agree("O", other.result.out, judged.result.out, allowed, rows)
    if fault or judged.result.lse is None or other.result.lse is None:
        return fault
    allowed = _allowed(judged.bound.lse.interval) + _allowed(other.bound.lse.interval)
    return agree("LSE", other.result.lse.double() - shift, judged.result.lse, allowed, live)


def _again(judged: Judged, problem: Problem) -> Judged:
    return Judged(judged.kernel, problem, str(judged.device))


def _verdict(name: str, judged: Judged, words: str, fault: str, message: str = "") -> Record:
    if fault and inaccurate(judged):
        return not_applicable(name, "forward.bound rejects the problem itself")
    return failed(name, judged, f"{words}: {fault}") if fault else passed(name, judged, message)


@check("relation.key_permutation", faults="BET", reruns=1)
def key_permutation(judged: Judged) -> Record:
    """Permuting the keys with their values, masks and biases changes nothing: the order of tiles is free."""
    name = "relation.key_permutation"
    p = judged.problem
    if p.num_keys < 2 or any(option in p.options() for option in _POSITIONAL):
        return not_applicable(name, "the position of a key matters, or there is only one")
    order = torch.randperm(p.num_keys, generator=torch.Generator().manual_seed(p.seed + 31))
    changes: dict[str, Any] = {"k": p.k[:, :, order], "v": p.v[:, :, order]}
    for option in ("mask", "bias"):
        x = getattr(p, option)
        if x is not None and x.shape[-1] > 1:
            changes[option] = x[..., order]
    fault = same_answer(judged, _again(judged, p.replaced(**changes)))
    return _verdict(name, judged, "permuted keys change the result", fault)


@check("relation.logit_shift", faults="BJL", reruns=1)
def logit_shift(judged: Judged) -> Record:
    """A constant added to every score of a row leaves O alone and adds to LSE; the constant differs by row.

    Through the bias, whose rows get constants between -64 and 64.
    """
    name = "relation.logit_shift"
    p = judged.problem
    capabilities = judged.kernel.capabilities
    if "bias" not in capabilities.options or p.sink is not None or not (p.num_queries and p.num_keys):
        return not_applicable(name, "no bias is declared, or a sink does not move along")
    generator = torch.Generator().manual_seed(p.seed + 32)
    steps = torch.randint(-64, 65, (1, p.num_heads, p.num_queries, 1), generator=generator).double()
    dtype = torch.float32 if p.bias is None else p.bias.dtype
    bias = steps if p.bias is None else p.bias.double() + steps
    full = bias.to(dtype).expand(1 if p.bias is None else bias.shape[0], -1, -1, p.num_keys).contiguous()
    if p.bias is not None and not torch.equal(full.double(), bias.expand_as(full)):
        # The sum was rounded: shift what was rounded instead, so that both problems are exact.
        base = p.replaced(bias=(full.double() - steps).to(torch.float32))
        full = (base.bias.double() + steps).to(torch.float32)  # type: ignore[union-attr]
        return _shifted(name, judged, _again(judged, base), base.replaced(bias=full), steps)
    moved = p.replaced(bias=full)
    if capabilities.refuses(moved) is not None:
        return not_applicable(name, "a bias is not declared together with the problem's options")
    return _shifted(name, judged, judged, moved, steps)


def _shifted(name: str, judged: Judged, base: Judged, moved: Problem, steps: Tensor) -> Record:
    other = _again(judged, moved)
    live = ~base.empty_rows
    allowed = _allowed(base.bound.out.interval) + _allowed(other.bound.out.interval)
    # What rounding the bias itself left is part of the second problem, and known exactly.
    drift = (other.exact.out - base.exact.out).abs()
    rows = live.unsqueeze(-1).expand_as(allowed)
    fault = agree("O", other.result.out, base.result.out, allowed + drift, rows)
    if not fault and base.result.lse is not None and other.result.lse is not None:
        allowed = _allowed(base.bound.lse.interval) + _allowed(other.bound.lse.interval)
        allowed = allowed + (other.exact.lse - base.exact.lse - steps[..., 0]).abs().nan_to_num(0.0)
        shift = steps[..., 0].expand_as(allowed)
        fault = agree("LSE", other.result.lse.double() - shift, base.result.lse, allowed, live)
    return _verdict(name, judged, "a constant added to a row's scores shows", fault)


@check("relation.unit_values", faults="PVB", reruns=1)
def unit_values(judged: Judged) -> Record:
    """Where V is 1 O is the sum of P: 1 without a sink; below 1, alike in all columns, with one."""
    name = "relation.unit_values"
    p = judged.problem
    if not (p.num_queries and p.num_keys):
        return not_applicable(name, "no pair of a query and a key")
    ones = _again(judged, p.replaced(v=torch.ones_like(p.v)))
    live = ~judged.empty_rows
    rows = live.unsqueeze(-1).expand_as(ones.result.out)
    allowed = _allowed(ones.bound.out.interval)
    got = ones.result.out.double()
    if p.sink is None:
        fault = agree("O", got, torch.full_like(got, p.v_descale), allowed, rows)
        return _verdict(name, judged, "the weights of a row do not sum to 1", fault)
    fault = agree("O", got, got[..., :1].expand_as(got), 2 * allowed, rows)
    above = rows & (got > p.v_descale + allowed)
    if not fault and bool(above.any()):
        fault = f"O{above.nonzero()[0].tolist()} is above 1 although a sink takes a share"
    return _verdict(name, judged, "the weights of a row are wrong", fault)


@check("relation.repeated_heads", faults="I", reruns=1)
def repeated_heads(judged: Judged) -> Record:
    """Grouped key/value heads give what the same heads written out once per query head give."""
    name = "relation.repeated_heads"
    p = judged.problem
    if p.group == 1:
        return not_applicable(name, "no grouped heads")
    k, v = (x.repeat_interleave(p.group, 1) for x in (p.k, p.v))
    fault = same_answer(judged, _again(judged, p.replaced(k=k, v=v)))
    return _verdict(name, judged, "repeating the key/value heads changes the result", fault)


@check("relation.scale_sign", faults="S", reruns=1)
def scale_sign(judged: Judged) -> Record:
    """Changing the sign of the scale and of q together changes nothing."""
    name = "relation.scale_sign"
    p, capabilities = judged.problem, judged.kernel.capabilities
    if "scale" not in capabilities.options or p.effective_scale == 0:
        return not_applicable(name, "no scale is declared, or it is 0")
    scale = p.effective_scale / (p.q_descale * p.k_descale)
    negated = p.replaced(q=(-p.q.double()).to(p.q.dtype), scale=-scale)
    if capabilities.refuses(negated) is not None:
        return not_applicable(name, "a negative scale is not declared together with the problem's options")
    fault = same_answer(judged, _again(judged, negated))
    return _verdict(name, judged, "signs of scale and q do not cancel", fault)


@check("relation.split_merge", faults="ATJ", reruns=2)
def split_merge(judged: Judged) -> Record:
    """Two parts of the keys, merged by their log-sum-exps, give the whole; an empty part is the identity.

    O = (O1 e^(L1-L) + O2 e^(L2-L)), L = log(e^L1 + e^L2), merged in float64.
    """
    name = "relation.split_merge"
    p, capabilities = judged.problem, judged.kernel.capabilities
    if not capabilities.lse or p.num_keys < 2 or p.sink is not None:
        return not_applicable(name, "no LSE is declared, a sink would count twice, or keys are few")
    parts = _parts(judged)
    if parts is None:
        return not_applicable(name, "the keys cannot be split with the options that are declared")
    halves = [_again(judged, part) for part in parts]
    share, lse, merged = _merged([h.result.out for h in halves], [h.result.lse for h in halves])
    # An error e of L1 or L2 moves the weights by at most a factor e^(2e).
    errors = [_allowed(h.bound.lse.interval).nan_to_num(0.0, 0.0, 0.0) for h in halves]
    drift = torch.expm1(2 * torch.maximum(*errors)).unsqueeze(-1)
    allowed = _allowed(judged.bound.out.interval) + 2.0**-48
    for s, h in zip(share, halves, strict=True):
        one = torch.where(s.unsqueeze(-1) > 0, _allowed(h.bound.out.interval), 0.0)
        allowed = allowed + s.unsqueeze(-1) * (one + drift * h.result.out.double().abs())
    live = ~judged.empty_rows
    rows = live.unsqueeze(-1).expand_as(allowed)
    slack = _allowed(judged.bound.lse.interval) + torch.maximum(*errors) + 1e-12
    if not all(same_scales(p, part, judged.rules.arithmetic) for part in parts):
        # The parts multiply other values than the whole: what that makes is known exactly.
        _, exact_lse, exact = _merged([h.exact.out for h in halves], [h.exact.lse for h in halves])
        allowed = allowed + (exact - judged.exact.out).abs().nan_to_num(0.0)
        slack = slack + (exact_lse - judged.exact.lse).abs().nan_to_num(0.0)
    fault = agree("O", judged.result.out, merged, allowed, rows)
    if not fault and judged.result.lse is not None:
        fault = agree("LSE", judged.result.lse, lse, slack, live)
    return _verdict(name, judged, "two parts of the keys do not merge into the whole", fault)


def _merged(outs: list[Tensor], lses: list[Tensor | None]) -> tuple[list[Tensor], Tensor, Tensor]:
    """The shares of two parts, and LSE and O of the whole, in float64."""
    first, second = (x.double() for x in lses if x is not None)
    top = torch.maximum(first, second)
    safe = torch.where(torch.isneginf(top), 0.0, top)
    weights = [torch.exp(x - safe) for x in (first, second)]
    total = weights[0] + weights[1]
    share = [w / torch.where(total == 0, 1.0, total) for w in weights]
    out = share[0].unsqueeze(-1) * outs[0].double() + share[1].unsqueeze(-1) * outs[1].double()
    return share, safe + torch.log(total), out


def _parts(judged: Judged) -> tuple[Problem, Problem] | None:
    """The problem on the first and on the other keys: slices where positions mean nothing, else masks."""
    p, capabilities = judged.problem, judged.kernel.capabilities
    cut = 1 + (p.seed % (p.num_keys - 1))
    made: list[Problem] = []
    for keys in (slice(0, cut), slice(cut, p.num_keys)):
        if not any(option in p.options() for option in _POSITIONAL) and capabilities.cross_lengths:
            cuts = {
                o: x[..., keys]
                for o in ("mask", "bias")
                if (x := getattr(p, o)) is not None and x.shape[-1] > 1
            }
            part = p.replaced(k=p.k[:, :, keys], v=p.v[:, :, keys], **cuts)
        else:
            inside = torch.zeros(1, 1, 1, p.num_keys, dtype=torch.bool)
            inside[..., keys] = True
            part = p.replaced(mask=inside if p.mask is None else p.mask & inside)
        rows = part.visible().any(-1)
        declared = capabilities.empty_rows or bool(rows.all())
        if capabilities.refuses(part) is not None or not declared:
            return None
        made.append(part)
    return made[0], made[1]
