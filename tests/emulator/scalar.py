"""The online softmax of one row as a scalar loop over Python floats: the emulator's second opinion."""

from __future__ import annotations

import math

import torch

from flashcheck.arithmetic import Arithmetic
from flashcheck.formats import FP32, Format, round_nearest
from flashcheck.problem import Problem


def rounded(x: float, fmt: Format = FP32) -> float:
    return float(round_nearest(torch.tensor([x], dtype=torch.float64), fmt))


def scalar_forward(
    p: Problem, a: Arithmetic, row: tuple[int, int, int], *, fused: bool
) -> tuple[list[float], float]:
    """(out, lse) of one row; special functions correctly rounded; no options but the scale."""
    b, h, i = row
    kv = h // p.group
    q, k, v = p.q[b, h, i].tolist(), p.k[b, kv].tolist(), p.v[b, kv].tolist()
    base2 = a.scale_placement.startswith("exponent")
    scale = rounded(p.effective_scale)
    constant = rounded(p.effective_scale * math.log2(math.e))
    m, total, acc = -math.inf, 0.0, [0.0] * p.value_dim
    starts = list(range(0, p.num_keys, a.block_keys or 1))
    for start in starts[::-1] if a.order == "descending" else starts:
        keys = range(start, min(start + (a.block_keys or 1), p.num_keys))
        s = {}
        for j in keys:
            dot = 0.0
            for x, y in zip(q, k[j], strict=True):
                dot = rounded(dot + rounded(x * y))
            s[j] = dot if base2 else rounded(dot * scale)
        new = max(m, *s.values())
        if m == -math.inf:
            factor = 0.0
        elif base2:
            factor = rounded(2.0 ** rounded(rounded(m - new) * constant))
        else:
            factor = rounded(math.exp(rounded(m - new)))
        total, acc, m = rounded(total * factor), [rounded(x * factor) for x in acc], new
        for j in keys:
            weight = rounded(_weight(s[j], m, constant, a, fused=fused))  # of c times the weight, if lifted
            weight /= a.lifted
            stored = rounded(rounded(weight * a.probability_scale), a.probability_format)
            total = rounded(total + (stored / a.probability_scale if a.row_sum == "rounded" else weight))
            for d in range(p.value_dim):
                acc[d] = rounded(acc[d] + rounded(stored * v[j][d]))
    inverse = rounded(1 / rounded(total * a.probability_scale))
    out = [rounded(rounded(x * inverse), a.output_format) for x in acc]
    maximum = rounded(m * scale) if base2 else m
    if a.lift:
        maximum = rounded(_lifted(m, constant, a, fused=fused) * rounded(math.log(2.0)))
        total *= a.lifted
    return out, rounded(maximum + rounded(math.log(total)))


def _weight(s: float, m: float, constant: float, a: Arithmetic, *, fused: bool) -> float:
    if a.scale_placement == "exponent_subtract_first":
        return 2.0 ** rounded(rounded(s - m) * constant)
    if a.scale_placement == "exponent_fma":
        product = s * constant if fused else rounded(s * constant)
        return 2.0 ** rounded(product - _lifted(m, constant, a, fused=fused))
    return math.exp(rounded(s - m))


def _lifted(m: float, constant: float, a: Arithmetic, *, fused: bool) -> float:
    """What the exponent subtracts: the maximum in log2 units, less the log2 of P's scale under a lift."""
    if not a.lift:
        return rounded(m * constant)
    product = m * constant if fused else rounded(m * constant)
    return rounded(product - math.log2(a.probability_scale))
