"""Special cases of the contract: rows without keys, NaN and inf, scores past the end of fp32."""

from __future__ import annotations

import torch
from torch import Tensor

from flashcheck.checks.bits import differing_numbers
from flashcheck.checks.judged import Judged
from flashcheck.checks.record import Record, Status
from flashcheck.checks.registry import check, failed, not_applicable, passed
from flashcheck.formats import FP32, ulp
from flashcheck.kernel import ForwardResult
from flashcheck.problem import Problem

CLEAR_LEAD = 2.0**-10
"""Relative lead of the largest score over the next from which an fp32 rounding cannot change who leads."""


@check("special.empty_rows", faults="AJ")
def empty_rows(judged: Judged) -> Record:
    """A row that sees no key has O = 0 and LSE = -inf, exactly; its sink's logit where there is one.

    Contract, point 4.
    """
    name = "special.empty_rows"
    if not judged.kernel.capabilities.empty_rows:
        return not_applicable(name, "empty rows are not declared")
    empty = judged.empty_rows
    if not bool(empty.any()):
        return not_applicable(name, "every row sees a key")
    line = judged.problem.describe()
    out = judged.result.out.double()[empty]
    if bool((out != 0).any()):
        wrong = int((out != 0).any(-1).sum())
        value = float(out[out != 0][0])
        message = f"O is not 0 in {wrong} of {len(out)} rows that see no key (first value {value!r})"
        return Record(name, Status.FAIL, message, problem=line)
    lse = judged.result.lse
    if lse is not None:
        got, expected = lse.double()[empty], judged.exact.lse[empty]
        # Without a sink the interval of such a row is -inf alone; a sink's logit may be rounded on its way.
        bad = ~judged.bound.lse.interval.accepts(lse)[empty]
        if bool(bad.any()):
            message = (
                f"LSE is {float(got[bad][0])!r} instead of {float(expected[bad][0])!r} in "
                f"{int(bad.sum())} of {len(got)} rows that see no key"
            )
            return Record(name, Status.FAIL, message, problem=line)
    return Record(name, Status.PASS, f"{len(out)} rows", problem=line)


@check("special.nonfinite", faults="EQ", reruns=5)
def nonfinite(judged: Judged) -> Record:
    """NaN in q, k or v, and inf in v, reach every row that sees them and change no other bit.

    Planted in v only at a key that every row of its heads sees: data that a mask hides must be finite
    (contract, point 6).
    """
    name = "special.nonfinite"
    if not judged.kernel.capabilities.isolates_nonfinite:
        return not_applicable(name, "isolation of NaN and inf is not declared")
    visible = judged.exact.visible
    places = visible.any(-2).nonzero()
    if not len(places):
        return not_applicable(name, "no row sees a key")
    line = judged.problem.describe()
    planted = 0
    problem = judged.problem
    # Values are planted in place: other addresses may mean another alignment, and other last bits.
    own = problem.replaced(q=problem.q.clone(), k=problem.k.clone(), v=problem.v.clone())
    before = judged.run(own)
    values = [("q", torch.nan), ("k", torch.nan), ("v", torch.nan)]
    if bool(torch.isinf(torch.tensor(torch.inf).to(problem.v.dtype).double())):
        values.append(("v", torch.inf))  # e4m3 has no inf: storing one gives its largest number, or NaN
    for tensor, value in values:
        fault = _plant(judged, own, before, tensor, value)
        if fault is None:
            continue
        planted += 1
        if fault:
            return Record(name, Status.FAIL, fault, problem=line)
    return Record(name, Status.PASS, f"{planted} values planted", problem=line)


def _plant(judged: Judged, problem: Problem, before: ForwardResult, tensor: str, value: float) -> str | None:
    """The fault that ``value`` in the middle of ``tensor`` shows; "" for none, None if no place fits."""
    visible = judged.exact.visible
    by_kv_head = torch.unflatten(visible, 1, (problem.num_kv_heads, problem.group))
    affected = torch.zeros_like(visible[..., 0])  # rows that must show it
    if tensor == "q":
        places = visible.any(-1).nonzero()
        b, h, i = places[len(places) // 2].tolist()
        index, label = (b, h, i, problem.head_dim // 2), f"q[{b},{h},{i}]"
        affected[b, h, i] = True
    else:
        seen = by_kv_head.all((2, 3)) if tensor == "v" else by_kv_head.any(2).any(2)
        places = seen.nonzero()
        if not len(places) or not problem.num_queries:
            return None
        b, h, j = places[len(places) // 2].tolist()
        dim = problem.head_dim if tensor == "k" else problem.value_dim
        index, label = (b, h, j, dim // 2), f"{tensor}[{b},{h},{j}]"
        heads = slice(h * problem.group, (h + 1) * problem.group)
        affected[b, heads] = visible[b, heads, :, j]
    changed = getattr(problem, tensor)
    kept = changed[index].clone()
    changed[index] = value
    result = judged.run(problem)
    changed[index] = kept
    return _spread_fault(before, result, affected, tensor, index[3], f"{value} in {label}")


def _spread_fault(
    before: ForwardResult, result: ForwardResult, affected: Tensor, tensor: str, column: int, planted: str
) -> str:
    reached = ~torch.isfinite(result.out.double())
    if tensor == "v":
        reached = reached[..., column : column + 1]
    missed = affected & ~reached.all(-1)
    if bool(missed.any()):
        index = tuple(missed.nonzero()[0].tolist())
        return f"{planted} does not reach O{list(index)}, which sees it ({int(missed.sum())} rows swallow it)"
    strayed = differing_numbers(result.out, before.out).any(-1) & ~affected
    if result.lse is not None and before.lse is not None:
        lse_missed = affected & torch.isfinite(result.lse.double())
        if tensor != "v" and bool(lse_missed.any()):
            index = tuple(lse_missed.nonzero()[0].tolist())
            return f"{planted} does not reach LSE{list(index)}, which sees it"
        strayed |= differing_numbers(result.lse, before.lse) & (~affected | (tensor == "v"))
    if bool(strayed.any()):
        index = tuple(strayed.nonzero()[0].tolist())
        return (
            f"{planted} changes row {list(index)}, which does not see it ({int(strayed.sum())} rows change)"
        )
    return ""


@check("special.no_silent_overflow", faults="Q")
def no_silent_overflow(judged: Judged) -> Record:
    """Where scores pass the end of fp32, the result is the right one, inf or NaN: never finite and wrong.

    Judged on rows whose largest score lies past the end of fp32, on either side, and leads the next by more
    than 2^-10 of itself: there the exact O is the value of one key, and LSE is past fp32 (contract, point 7).
    A row whose scores all overflow to -inf is not an empty one. Rows in which the partial sums of a score may
    overflow to the other side are left out.
    """
    name = "special.no_silent_overflow"
    if not judged.kernel.capabilities.isolates_nonfinite:
        return not_applicable(name, "non-finite intermediate values are not declared")
    top = judged.exact.row_max
    scores = judged.exact.scores
    if scores.shape[-1] < 1 or judged.problem.sink is not None:
        return not_applicable(name, "no score leaves the range of fp32")
    two = scores.topk(min(2, scores.shape[-1]), -1).values
    lead = two[..., 0] - two[..., -1] if two.shape[-1] == 2 else torch.full_like(top, torch.inf)
    rows = (top.abs() > FP32.max_finite * (1 + CLEAR_LEAD)) & torch.isfinite(top)
    rows &= lead > CLEAR_LEAD * top.abs()
    rows &= ~_two_sided(judged)
    if not bool(rows.any()):
        return not_applicable(name, "no score leaves the range of fp32 with a clear lead")
    line = judged.problem.describe()
    got, exact = judged.result.out.double()[rows], judged.exact.out[rows]
    allowed = ulp(exact, judged.rules.arithmetic.output_format)
    wrong = torch.isfinite(got) & ~((got - exact).abs() <= allowed)
    if bool(wrong.any()):
        at = tuple(wrong.nonzero()[0].tolist())
        message = (
            f"O is finite and wrong in {int(wrong.any(-1).sum())} of {int(rows.sum())} rows whose scores "
            f"overflow fp32 (first: got {float(got[at])!r}, exact {float(exact[at])!r})"
        )
        return Record(name, Status.FAIL, message, problem=line)
    lse = judged.result.lse
    if lse is not None and bool(torch.isfinite(lse.double()[rows]).any()):
        return Record(name, Status.FAIL, "LSE is finite where it lies past the end of fp32", problem=line)
    return Record(name, Status.PASS, f"{int(rows.sum())} rows", problem=line)


def _two_sided(judged: Judged) -> Tensor:
    """Boolean (B, H, Nq): rows with a score whose positive and negative products both reach past fp32."""
    problem = judged.problem
    q, k = problem.q.double(), problem.k.double().repeat_interleave(problem.group, 1).transpose(-1, -2)
    up, down = q.clamp(min=0), (-q).clamp(min=0)
    positive = up @ k.clamp(min=0) + down @ (-k).clamp(min=0)
    negative = up @ (-k).clamp(min=0) + down @ k.clamp(min=0)
    both = torch.minimum(positive, negative) * max(1.0, abs(problem.effective_scale)) > FP32.max_finite / 2
    return (both & judged.exact.visible).any(-1)


@check("special.empty_rows_backward", faults="AE", reruns=4)
def empty_rows_backward(judged: Judged) -> Record:
    """A row that sees no key adds nothing to any gradient: its dQ is 0; other q and dO there change no bit.

    Contract, point 4; a sequence without keys is rows of this kind, a key that no row sees has dK = dV = 0.
    """
    name = "special.empty_rows_backward"
    if judged.kernel.backward is None or not judged.kernel.capabilities.empty_rows:
        return not_applicable(name, "no backward is declared, or empty rows are not")
    empty, unseen = judged.empty_rows, _unseen_keys(judged)
    if not judged.backward_defined or not (bool(empty.any()) or bool(unseen.any())):
        return not_applicable(name, "every row sees a key and every key is seen")
    got = judged.gradients
    wild = _wild(judged)
    for tensor, rows in (("dq", empty), ("dk", unseen), ("dv", unseen)):
        if tensor not in wild:
            continue
        wrong = ((got[tensor].double() != 0) & ~wild[tensor])[rows]
        if bool(wrong.any()):
            count = int(wrong.any(-1).sum())
            what = "see no key" if tensor == "dq" else "no row sees"
            return failed(name, judged, f"{tensor} is not 0 in {count} of {int(rows.sum())} rows that {what}")
    if bool(empty.any()) and judged.kernel.capabilities.deterministic:
        p = judged.gradient_problem
        assert p.dout is not None
        q, dout = (torch.where(empty.unsqueeze(-1), 2.0, x.double()).to(x.dtype) for x in (p.q, p.dout))
        second = Judged(judged.kernel, p.replaced(q=q, dout=dout), str(judged.device))
        other = second.gradients
        for tensor, x in got.items():
            changed = differing_numbers(other[tensor], x)
            if tensor == "dsink" or tensor not in wild or not bool(changed.any()):
                continue
            if bool((changed & ~wild[tensor] & ~_wild(second)[tensor]).any()):
                message = f"q and dO of rows that see no key change {tensor}"
                return failed(name, judged, message)
    return passed(name, judged, f"{int(empty.sum())} rows, {int(unseen.sum())} keys")


def _wild(judged: Judged) -> dict[str, Tensor]:
    """Elements of every gradient that are inf or NaN where the way to them may leave the range (contract,
    point 7): dO V of a hidden pair may, and 0 times infinity is NaN."""
    bounds = judged.backward_bound.tensors
    return {
        n: ~torch.isfinite(x) & bounds[n].interval.may_overflow
        for n, x in judged.gradients.items()
        if n in bounds
    }


def _unseen_keys(judged: Judged) -> Tensor:
    """Boolean (B, Hkv, Nk): keys that no row of their heads sees."""
    p = judged.problem
    return ~torch.unflatten(judged.exact.visible.any(-2), 1, (p.num_kv_heads, p.group)).any(2)
