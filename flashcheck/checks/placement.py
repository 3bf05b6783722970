"""Where a head stands in the batch, and how large V is, must not show in its bits."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from flashcheck.checks.bits import differing, differing_numbers
from flashcheck.checks.designed import normal
from flashcheck.checks.judged import Judged
from flashcheck.checks.record import Record
from flashcheck.checks.registry import check, failed, not_applicable, passed
from flashcheck.formats import FP32
from flashcheck.kernel import ForwardResult
from flashcheck.operands import same_scales
from flashcheck.problem import Problem


def rearranged(problem: Problem, batches: Tensor, kv_heads: Tensor) -> tuple[Problem, Tensor]:
    """The problem of some batches and key/value heads, in that order; and the query heads it has."""
    heads = (kv_heads.unsqueeze(-1) * problem.group + torch.arange(problem.group)).flatten()
    changes: dict[str, Any] = {
        "q": problem.q[batches][:, heads],
        "k": problem.k[batches][:, kv_heads],
        "v": problem.v[batches][:, kv_heads],
    }
    for name in ("mask", "bias"):
        x = getattr(problem, name)
        if x is not None:
            x = x if x.shape[0] == 1 else x[batches]
            changes[name] = x if x.shape[1] == 1 else x[:, heads]
    if problem.alibi_slopes is not None:
        slopes = problem.alibi_slopes
        changes["alibi_slopes"] = slopes[heads] if slopes.ndim == 1 else slopes[batches][:, heads]
    if problem.sink is not None:
        changes["sink"] = problem.sink[heads]
    if problem.key_lengths is not None:
        changes["key_lengths"] = problem.key_lengths[batches]
    if problem.dout is not None:
        changes["dout"] = problem.dout[batches][:, heads]
    return problem.replaced(**changes), heads


@check("bitwise.batch", faults="WIN", reruns=2)
def bitwise_batch(judged: Judged) -> Record:
    """Permuting batches and heads permutes the result, and a head computed alone gives the same bits.

    Judged where the kernel declares itself batch invariant.
    """
    name = "bitwise.batch"
    if not judged.kernel.capabilities.batch_invariant:
        return not_applicable(name, "batch invariance is not declared")
    problem = judged.problem
    generator = torch.Generator().manual_seed(problem.seed + 21)
    batches = torch.randperm(problem.batch, generator=generator)
    kv_heads = torch.randperm(problem.num_kv_heads, generator=generator)
    trials = [("permuted", batches, kv_heads), ("alone", batches[:1], kv_heads[:1])]
    for text, some, those in trials:
        if text == "permuted" and len(some) == len(those) == 1:
            continue
        moved, heads = rearranged(problem, some, those)
        if not same_scales(problem, moved, judged.rules.arithmetic):
            continue
        got = judged.run(moved)
        fault = _same(got, _picked(judged.result, some, heads))
        if fault:
            return failed(
                name,
                judged,
                f"batches {some.tolist()} with key/value heads {those.tolist()} {text}: {fault}",
            )
    return passed(name, judged)


def _picked(result: ForwardResult, batches: Tensor, heads: Tensor) -> ForwardResult:
    lse = None if result.lse is None else result.lse[batches][:, heads]
    return ForwardResult(result.out[batches][:, heads], lse)


def _same(got: ForwardResult, expected: ForwardResult, judged: Tensor | None = None) -> str:
    """Where two results differ in a bit, in words; ``judged`` limits the elements of O."""
    for label, x, y in (("O", got.out, expected.out), ("LSE", got.lse, expected.lse)):
        if x is None or y is None:
            continue
        different = differing(x, y)
        if label == "O" and judged is not None:
            different = different & judged
        if bool(different.any()):
            index = tuple(different.nonzero()[0].tolist())
            place = f"{label}[{','.join(map(str, index))}]"
            return (
                f"{place} is {float(x[index]).hex()} instead of {float(y[index]).hex()} "
                f"({int(different.sum()):,} of {different.numel():,} elements differ)"
            )
    return ""


@check("bitwise.scaling", faults="PQYB", reruns=2)
def bitwise_scaling(judged: Judged) -> Record:
    """Doubling V doubles O bit for bit; q doubled and k halved change nothing.

    Powers of two commute with every rounding inside the normal range; elements at its ends are left out.
    """
    name = "bitwise.scaling"
    if not judged.kernel.capabilities.deterministic:
        return not_applicable(name, "the kernel does not declare itself deterministic")
    p = judged.problem
    rules = judged.rules.arithmetic
    out_fmt = rules.output_format
    # Operands as the matrix unit gets them: converted, and perhaps already scaled.
    formats = [f for f in (p.format, rules.input_format, rules.product_format) if f is not None]
    smallest, most = max(2.0**f.min_exponent for f in formats), min(f.max_finite for f in formats)
    share = abs(p.effective_scale) ** 0.5 if rules.scale_placement == "operands" else 1.0
    low = smallest / min(share, 1.0) if share else math.inf
    # A unit that aligns addends by their exponents takes a subnormal operand at the smallest normal exponent
    # (THEORY 2.3): doubled, it may not move. Clones, written in place: the addresses stay.
    own = p.replaced(q=_at_least(p.q, low), k=_at_least(p.k, 2 * low), v=_at_least(p.v, smallest))
    before = judged.run(own)
    before = ForwardResult(before.out.clone(), None if before.lse is None else before.lse.clone())
    done = []
    largest = _largest(own.v)
    if 0 < largest * 2 <= most and largest * max(p.num_keys, 1) < 2.0**120:
        v = own.v.clone()
        own.v.copy_((v.double() * 2).to(v.dtype))
        after = judged.run(own)
        own.v.copy_(v)
        doubled = ForwardResult((before.out.double() * 2).to(before.out.dtype), before.lse)
        size = before.out.double().abs()
        # What was rounded among subnormal numbers, fp32's on the way included, is no longer exact; the
        # smallest normal number itself may have been rounded up from there.
        lowest = max(2.0**out_fmt.min_exponent, largest * 2.0**-90, 2.0**-90)
        inside = (size > lowest) & (2 * size < out_fmt.max_finite)
        fault = _same(after, doubled, inside & torch.isfinite(before.out.double()))
        if fault:
            return failed(name, judged, f"V doubled does not double O: {fault}")
        done.append("V")
    if 0 < 2 * _largest(own.q) * max(share, 1.0) <= most and _largest(own.k) and _moderate(own):
        own.q.copy_((own.q.double() * 2).to(p.q.dtype))
        own.k.copy_((own.k.double() / 2).to(p.k.dtype))
        fault = _same(judged.run(own), before)
        if fault:
            return failed(name, judged, f"q doubled and k halved change the result: {fault}")
        done.append("q against k")
    if not done:
        return not_applicable(name, "doubling leaves the range of the format")
    return passed(name, judged, ", ".join(done))


def _largest(x: Tensor) -> float:
    return float(x.double().abs().max()) if x.numel() else 0.0


def _at_least(x: Tensor, smallest: float) -> Tensor:
    """A copy in which elements nearer to 0 than ``smallest`` are 0."""
    return torch.where(x.double().abs() < smallest, torch.zeros((), dtype=x.dtype, device=x.device), x)


def _moderate(problem: Problem) -> bool:
    """No product of an element of q and one of k, or a sum, is near either end of fp32."""
    q, k = problem.q.double().abs(), problem.k.double().abs()
    smallest = [float(torch.where(x == 0, torch.inf, x).min()) for x in (q, k)]
    low, high = smallest[0] * smallest[1], _largest(q) * _largest(k) * problem.head_dim
    scale = abs(problem.effective_scale)
    return low * min(scale or 1.0, 1.0) > 2.0**-100 and high * max(scale, 1.0) < 2.0**100


@check("bitwise.gradient_scaling", faults="PQ", reruns=4)
def bitwise_gradient_scaling(judged: Judged) -> Record:
    """Doubling dO doubles dQ, dK and dV bit for bit.

    Judged where dS keeps the exponent range of fp32 (fp32, bf16), away from the ends of the range.
    """
    name = "bitwise.gradient_scaling"
    rules = judged.rules.arithmetic
    formats = [rules.grad_score_format or rules.probability_format, rules.output_format]
    if judged.kernel.backward is None or not judged.kernel.capabilities.deterministic:
        return not_applicable(name, "no backward is declared, or it is not deterministic")
    if any(f.min_exponent > -126 for f in formats) or not judged.backward_defined:
        return not_applicable(name, "dS does not keep the exponent range of fp32")
    p = judged.gradient_problem
    assert p.dout is not None
    if p.dlse is not None or _largest(p.dout) * _largest(p.v) * p.value_dim > 2.0**60:
        return not_applicable(name, "the range of fp32 is near")
    before = {n: x.clone() for n, x in judged.gradients.items() if n in ("dq", "dk", "dv")}
    doubled = p.replaced(dout=(p.dout.double() * 2).to(p.dout.dtype))
    after = Judged(judged.kernel, doubled, str(judged.device)).gradients
    for tensor, x in before.items():
        size = x.double().abs()
        largest = float(size.max()) if size.numel() else 0.0
        inside = (size > max(largest * 2.0**-60, 2.0**-100)) & (size < 2.0**100)
        bad = differing((x.double() * 2).to(x.dtype), after[tensor]) & inside
        if bool(bad.any()):
            index = tuple(bad.nonzero()[0].tolist())
            return failed(
                name,
                judged,
                f"dO doubled does not double {tensor}: at {list(index)} "
                f"{float(after[tensor][index]).hex()} against 2 x {float(x[index]).hex()} "
                f"({int(bad.sum()):,} elements)",
            )
    return passed(name, judged)


@check("bitwise.suffix", faults="CDA", reruns=1)
def bitwise_suffix(judged: Judged) -> Record:
    """Other keys and values after a cut change no number, to the last bit, in a row that sees none of them.

    A causal model must give the same answer for a prefix whatever follows it. The sign of a zero is free.
    """
    name = "bitwise.suffix"
    if not judged.kernel.capabilities.deterministic:
        return not_applicable(name, "the kernel does not declare itself deterministic")
    p, visible = judged.problem, judged.exact.visible
    if p.num_keys < 2:
        return not_applicable(name, "fewer than two keys")
    sees = [(visible[..., cut:].any(-1), cut) for cut in {p.num_keys // 2, p.num_keys - 1, 1}]
    rows, cut = max(sees, key=lambda item: min(int((~item[0]).sum()), int(item[0].sum())))
    if bool(rows.all()) or (not judged.kernel.capabilities.empty_rows and bool(judged.empty_rows.any())):
        return not_applicable(name, "every row sees every suffix of the keys")
    own = p.replaced(k=p.k.clone(), v=p.v.clone())  # in place: the addresses stay
    before = judged.run(own)
    before = ForwardResult(before.out.clone(), None if before.lse is None else before.lse.clone())
    size = math.sqrt(max(abs(p.effective_scale), 1e-3))
    own.k[:, :, cut:] = (normal(p.k, p.seed + 22).double() / size).to(p.k.dtype)[:, :, cut:]
    own.v[:, :, cut:] = normal(p.v, p.seed + 23)[:, :, cut:]
    if not same_scales(p, own, judged.rules.arithmetic):
        for mine, x in ((own.k, p.k), (own.v, p.v)):  # other values of the same size
            mine[:, :, cut:] = (-x.double().roll(1, -1)).to(x.dtype)[:, :, cut:]
    after = judged.run(own)
    bad = differing_numbers(after.out, before.out).any(-1)
    if after.lse is not None and before.lse is not None:
        bad = bad | differing_numbers(after.lse, before.lse)
    owed = ~rows & ~(_may_leave_score_format(judged, p) | _may_leave_score_format(judged, own))
    bad = bad & owed
    if bool(bad.any()):
        index = bad.nonzero()[0].tolist()
        return failed(
            name,
            judged,
            f"other keys from {cut} on change row {index}, which sees none ({int(bad.sum())} rows)",
        )
    if not bool(owed.any()):
        return not_applicable(name, "hidden scores may leave the format of the scores in every row")
    return passed(name, judged, f"{int(owed.sum())} rows keep their bits")


def _may_leave_score_format(judged: Judged, problem: Problem) -> Tensor:
    """Rows (batch, heads, num_queries) of which a score, hidden ones included, may come out infinite.

    A kernel that hides by adding -inf turns such a score into NaN; only one that isolates non-finite values
    promises otherwise. Half of the format's range leaves room for the rounding of the sum.
    """
    rows = torch.zeros(problem.q.shape[:3], dtype=torch.bool, device=problem.q.device)
    fmt = judged.rules.arithmetic.score_format or FP32
    if judged.kernel.capabilities.isolates_nonfinite:
        return rows
    keys = problem.k.double().repeat_interleave(problem.group, dim=1)
    scores = problem.q.double() @ keys.mT
    largest = scores.abs().amax(-1) * max(1.0, abs(problem.effective_scale))
    return ~(largest * judged.rules.arithmetic.score_scale < fmt.max_finite / 2)
