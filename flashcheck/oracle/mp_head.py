"""One head of attention in mpmath: what the last rung's forward and backward are made of."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import mpmath
import torch
from torch import Tensor

from flashcheck.formats import to_float64
from flashcheck.problem import Problem

Real = Any  # an mpf of the context in use; mpmath has no types
Vector = list[Real]
Matrix = list[Vector]

DIGITS = 34
"""Decimal digits wanted when the caller names none: twice those of float64."""

_GUARD_BITS = 32


@dataclass(frozen=True, slots=True)
class ExactForward:
    """Rows of one head as lists of mpf: R rows.

    ``out`` R x dv; ``lse``, ``row_max``, ``row_sum``, ``sink_probability`` R; ``raw`` (q . k of the
    stored values), ``products``, ``scores`` and ``probabilities`` R x Nk; ``bits``: the precision.
    """

    out: Matrix
    lse: Vector
    row_max: Vector
    row_sum: Vector
    sink_probability: Vector
    raw: Matrix
    products: Matrix
    scores: Matrix
    probabilities: Matrix
    visible: list[list[bool]]
    bits: int


def to_tensor(values: Any) -> Tensor:
    """Nested lists of mpf, each rounded to nearest, as a float64 tensor."""

    def floats(x: Any) -> Any:
        return [floats(y) for y in x] if isinstance(x, list) else float(x)

    return torch.tensor(floats(values), dtype=torch.float64)


def working_bits(problem: Problem, digits: int | None = None) -> int:
    """Precision at which scores carry about ``digits`` correct digits *after* the exponential.

    exp turns the absolute error of a score into a relative error of a weight, so the bits before the
    binary point of the largest score come on top of the wanted ones. The largest score is bounded by
    |scale| sum |q||k| and the additive terms; cancellation inside q . k is covered by the sum of
    magnitudes.
    """
    wanted = math.ceil((DIGITS if digits is None else digits) * math.log2(10))
    q, k = _finite(problem.q), _finite(problem.k)
    largest = 0.0
    for kv_head in range(problem.num_kv_heads):
        heads = slice(kv_head * problem.group, (kv_head + 1) * problem.group)
        if 0 in (problem.num_queries, problem.num_keys):
            continue
        a = (q[:, heads].abs().amax((1, 2)) * k[:, kv_head].abs().amax(1)).sum(-1)
        largest = max([largest, *a.tolist()])
    # In logarithms, because fp64 data may overflow a product.
    terms = [_log2(largest) + _log2(problem.effective_scale)]
    for extra in (problem.bias, problem.sink, problem.alibi_slopes):
        if extra is not None and extra.numel():
            terms.append(_log2(float(_finite(extra).abs().max())))
    if problem.alibi_slopes is not None:
        terms[-1] += _log2(problem.num_queries + problem.num_keys)
    magnitude = math.ceil(max(0.0, *terms)) + 2
    return wanted + magnitude + math.ceil(_log2(problem.num_keys + problem.head_dim + 2)) + _GUARD_BITS


def columns(m: Matrix, count: int) -> Matrix:
    """The ``count`` columns of a matrix, as vectors; also of a matrix without rows."""
    return [[row[c] for row in m] for c in range(count)]


def _finite(x: Tensor) -> Tensor:
    return torch.nan_to_num(to_float64(x).cpu(), nan=0.0, posinf=0.0, neginf=0.0)


def _without_poison(x: Tensor, used: Tensor) -> Tensor:
    """Rows of ``x`` as they are where ``used``; elsewhere with 0 in place of NaN and inf."""
    x = to_float64(x)
    return torch.where(used.unsqueeze(-1) | torch.isfinite(x), x, 0.0)


def _log2(x: float) -> float:
    return math.log2(abs(x)) if x and math.isfinite(x) else (1024.0 if x else -1074.0)


@lru_cache(maxsize=64)
def context_of(bits: int) -> Any:
    """The context of one precision: numbers of two contexts do not mix."""
    ctx = mpmath.MPContext()
    ctx.prec = bits
    return ctx


class Head:
    """Some query rows of one head at one precision."""

    def __init__(self, problem: Problem, b: int, h: int, rows: Iterable[int], bits: int) -> None:
        ctx = context_of(bits)
        self.ctx, self.problem, self.b, self.h, self.bits = ctx, problem, b, h, bits
        kv = h // problem.group
        self.index = torch.tensor(list(rows), dtype=torch.int64)
        visible = problem.visible(self.index)[b, h]
        # What is never seen may be NaN and must not be multiplied.
        seen, alive = visible.any(0), visible.any(1)
        self.q = self.matrix(_without_poison(problem.q[b, h][self.index], alive))
        self.k = self.matrix(_without_poison(problem.k[b, kv], seen))
        self.v = self.matrix(_without_poison(problem.v[b, kv], seen))
        self.visible: list[list[bool]] = visible.tolist()
        # scale and descales are floats; their product is taken as ``effective_scale`` rounds it,
        # because that float is what multiplies q . k by definition.
        self.scale = ctx.mpf(problem.effective_scale)
        self.sink = None if problem.sink is None else ctx.mpf(float(problem.sink[h]))

    def vector(self, x: Tensor) -> Vector:
        return [self.ctx.mpf(value) for value in to_float64(x).tolist()]

    def matrix(self, x: Tensor) -> Matrix:
        return [[self.ctx.mpf(value) for value in row] for row in to_float64(x).tolist()]

    def forward(self) -> ExactForward:
        raw = [[self.ctx.fdot(query, key) for key in self.k] for query in self.q]
        products = [[self.scale * x for x in row] for row in raw]
        extra = self.additive()
        result = ExactForward([], [], [], [], [], raw, products, [], [], self.visible, self.bits)
        for row, added, visible in zip(products, extra, self.visible, strict=True):
            scores = [
                self.softcapped(x) + y if seen else self.ctx.ninf
                for x, y, seen in zip(row, added, visible, strict=True)
            ]
            self.append_row(result, scores, visible)
        return result

    def append_row(self, result: ExactForward, scores: Vector, visible: Sequence[bool]) -> None:
        ctx = self.ctx
        logits = [*scores] if self.sink is None else [*scores, self.sink]
        m = max(logits, default=ctx.ninf)
        shift = ctx.zero if m == ctx.ninf else m
        weights = [ctx.exp(x - shift) for x in scores]
        sink = ctx.zero if self.sink is None else ctx.exp(self.sink - shift)
        l = ctx.fsum([*weights, sink])
        p = [w / l if seen and l else ctx.zero for w, seen in zip(weights, visible, strict=True)]
        descale = ctx.mpf(self.problem.v_descale)
        result.out.append(
            [descale * ctx.fdot(p, column) for column in columns(self.v, self.problem.value_dim)]
        )
        result.lse.append(m + ctx.log(l) if l else ctx.ninf)
        result.row_max.append(m)
        result.row_sum.append(l)
        result.sink_probability.append(sink / l if l else ctx.zero)
        result.scores.append(scores)
        result.probabilities.append(p)

    def softcapped(self, x: Real) -> Real:
        if self.problem.softcap is None:
            return x
        cap = self.ctx.mpf(self.problem.softcap)
        return cap * self.ctx.tanh(x / cap)

    def softcap_slope(self, x: Real) -> Real:
        """d softcap / dx = 1 / cosh(x / c)^2."""
        if self.problem.softcap is None:
            return self.ctx.one
        return 1 / self.ctx.cosh(x / self.ctx.mpf(self.problem.softcap)) ** 2

    def additive(self) -> Matrix:
        """Bias and ALiBi, R x Nk."""
        ctx, problem, index = self.ctx, self.problem, self.index
        total = [[ctx.zero] * problem.num_keys for _ in range(len(index))]
        if problem.bias is not None:
            b, h = (
                n if size > 1 else 0 for n, size in zip((self.b, self.h), problem.bias.shape, strict=False)
            )
            rows = problem.bias[b, h][index if problem.bias.shape[2] > 1 else torch.zeros_like(index)]
            total = self.matrix(rows.expand(len(index), problem.num_keys))
        if problem.alibi_slopes is not None:
            slopes = problem.alibi_slopes
            slope = ctx.mpf(float(slopes[self.h] if slopes.ndim == 1 else slopes[self.b, self.h]))
            aligned = problem.diagonal("bottom_right").key_of(index).tolist()
            total = [
                [x - slope * abs(diagonal - j) for j, x in enumerate(row)]
                for row, diagonal in zip(total, aligned, strict=True)
            ]
        return total
