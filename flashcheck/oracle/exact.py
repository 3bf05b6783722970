"""Last rung and reference of record: attention in mpmath, one head at a time, by the definition.

Scalar loops that restate ``problem.py``'s header; nothing is shared with the vectorised rungs but the
mask predicate. A context of its own carries the precision, so no global mpmath setting changes.
gmpy2 makes it several times faster and is used by mpmath when present.
"""

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
from flashcheck.oracle.quantities import BackwardQuantities, ForwardQuantities
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


@dataclass(slots=True)
class ExactBackward:
    """Gradients of a whole problem as nested lists of mpf; shapes as in ``BackwardQuantities``."""

    dq: list[list[Matrix]]
    dk: list[list[Matrix]]
    dv: list[list[Matrix]]
    dbias: list[list[Matrix]] | None
    dsink: Vector | None
    dscale: Real
    probabilities: list[list[Matrix]]
    grad_probabilities: list[list[Matrix]]
    grad_scores: list[list[Matrix]]
    delta: list[Matrix]
    num_rows: int
    bits: int

    def rounded(self, problem: Problem) -> BackwardQuantities:
        """Every field rounded to float64; ``problem`` is the one it came from (for empty shapes)."""
        pairs = (problem.batch, problem.num_heads, self.num_rows, problem.num_keys)
        bias, sink = problem.bias, problem.sink
        bias_shape = _bias_shape(problem, self.num_rows)
        return BackwardQuantities(
            dq=to_tensor(self.dq).reshape(*pairs[:3], problem.head_dim),
            dk=to_tensor(self.dk).reshape(problem.k.shape),
            dv=to_tensor(self.dv).reshape(problem.v.shape),
            dbias=None if bias is None else to_tensor(self.dbias).reshape(bias_shape),
            dsink=None if sink is None else to_tensor(self.dsink),
            dscale=to_tensor(self.dscale),
            probabilities=to_tensor(self.probabilities).reshape(pairs),
            grad_probabilities=to_tensor(self.grad_probabilities).reshape(pairs),
            grad_scores=to_tensor(self.grad_scores).reshape(pairs),
            delta=to_tensor(self.delta).reshape(pairs[:3]),
        )


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


def forward(
    problem: Problem,
    b: int,
    h: int,
    rows: Iterable[int] | None = None,
    digits: int | None = None,
    *,
    bits: int | None = None,
) -> ExactForward:
    """Query rows ``rows`` (None: all) of head h in batch b; ``bits`` overrides the chosen precision."""
    bits = working_bits(problem, digits) if bits is None else bits
    return _Head(problem, b, h, bits).forward(range(problem.num_queries) if rows is None else rows)


def forward_all(
    problem: Problem,
    rows: Iterable[int] | None = None,
    digits: int | None = None,
    *,
    bits: int | None = None,
) -> ForwardQuantities:
    """Every head's query rows ``rows`` (None: all), rounded to float64."""
    rows = list(range(problem.num_queries) if rows is None else rows)
    heads = [
        [forward(problem, b, h, rows, digits, bits=bits) for h in range(problem.num_heads)]
        for b in range(problem.batch)
    ]

    def field(name: str, *tail: int) -> Tensor:
        values = to_tensor([[getattr(head, name) for head in batch] for batch in heads])
        return values.reshape(problem.batch, problem.num_heads, len(rows), *tail)

    n = problem.num_keys
    return ForwardQuantities(
        out=field("out", problem.value_dim),
        lse=field("lse"),
        products=field("products", n),
        scores=field("scores", n),
        probabilities=field("probabilities", n),
        row_max=field("row_max"),
        row_sum=field("row_sum"),
        visible=problem.visible(torch.tensor(rows, dtype=torch.int64)),
    )


def backward(
    problem: Problem,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    digits: int | None = None,
    *,
    rows: Iterable[int] | None = None,
    bits: int | None = None,
) -> ExactBackward:
    """Gradients with respect to the stored q, k, v, to scale, bias and sink.

    Args:
        out, lse: stored values to condition on, (B, H, Nq, dv) and (B, H, Nq); None: from scratch.
        rows: query rows of which to give the contributions, None: all.
        bits: overrides the precision that is chosen from the problem and ``digits``.
    """
    bits = working_bits(problem, digits) if bits is None else bits
    rows = range(problem.num_queries) if rows is None else rows
    return _Backward(problem, out, lse, list(rows), bits).run()


def _finite(x: Tensor) -> Tensor:
    return torch.nan_to_num(to_float64(x).cpu(), nan=0.0, posinf=0.0, neginf=0.0)


def _log2(x: float) -> float:
    return math.log2(abs(x)) if x and math.isfinite(x) else (1024.0 if x else -1074.0)


@lru_cache(maxsize=64)
def _context(bits: int) -> Any:
    """The context of one precision: numbers of two contexts do not mix."""
    ctx = mpmath.MPContext()
    ctx.prec = bits
    return ctx


class _Head:
    """One head at one precision."""

    def __init__(self, problem: Problem, b: int, h: int, bits: int) -> None:
        ctx = _context(bits)
        self.ctx, self.problem, self.b, self.h, self.bits = ctx, problem, b, h, bits
        kv = h // problem.group
        self.q = self.matrix(problem.q[b, h])
        self.k = self.matrix(problem.k[b, kv])
        self.v = self.matrix(problem.v[b, kv])
        # scale and descales are floats; their product is taken as ``effective_scale`` rounds it,
        # because that float is what multiplies q . k by definition.
        self.scale = ctx.mpf(problem.effective_scale)
        self.sink = None if problem.sink is None else ctx.mpf(float(problem.sink[h]))

    def vector(self, x: Tensor) -> Vector:
        return [self.ctx.mpf(value) for value in to_float64(x).tolist()]

    def matrix(self, x: Tensor) -> Matrix:
        return [[self.ctx.mpf(value) for value in row] for row in to_float64(x).tolist()]

    def forward(self, rows: Iterable[int]) -> ExactForward:
        rows = list(rows)
        index = torch.tensor(rows, dtype=torch.int64)
        visible = self.problem.visible(index)[self.b, self.h].tolist()
        raw = [
            [self.dot(self.q[i], key, seen) for key, seen in zip(self.k, visible[r], strict=True)]
            for r, i in enumerate(rows)
        ]
        products = [[self.scale * x for x in row] for row in raw]
        extra = self.additive(index)
        result = ExactForward([], [], [], [], [], raw, products, [], [], visible, self.bits)
        for r in range(len(rows)):
            scores = [
                self.softcapped(x) + extra[r][j] if visible[r][j] else self.ctx.ninf
                for j, x in enumerate(products[r])
            ]
            self.append_row(result, scores, visible[r])
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
        seen_values = [(x, row) for x, row, seen in zip(p, self.v, visible, strict=True) if seen]
        descale = ctx.mpf(self.problem.v_descale)
        out = [
            descale * ctx.fdot((x, row[c]) for x, row in seen_values) for c in range(self.problem.value_dim)
        ]
        result.out.append(out)
        result.lse.append(m + ctx.log(l) if l else ctx.ninf)
        result.row_max.append(m)
        result.row_sum.append(l)
        result.sink_probability.append(sink / l if l else ctx.zero)
        result.scores.append(scores)
        result.probabilities.append(p)

    def dot(self, x: Vector, y: Vector, seen: bool) -> Real:
        """Exact sum of products, rounded once; 0 in place of NaN for a pair that is hidden."""
        total = self.ctx.fdot(x, y)
        return total if seen or self.ctx.isfinite(total) else self.ctx.zero

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

    def additive(self, index: Tensor) -> Matrix:
        """Bias and ALiBi, R x Nk."""
        ctx, problem = self.ctx, self.problem
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


class _Backward:
    """Accumulates the gradients over the heads of one problem."""

    def __init__(
        self, problem: Problem, out: Tensor | None, lse: Tensor | None, rows: list[int], bits: int
    ) -> None:
        self.problem, self.out, self.lse, self.rows, self.bits = problem, out, lse, rows, bits
        self.ctx = _context(bits)

    def zeros(self, *shape: int) -> Any:
        if not shape:
            return self.ctx.zero
        return [self.zeros(*shape[1:]) for _ in range(shape[0])]

    def run(self) -> ExactBackward:
        problem = self.problem
        heads = (problem.batch, problem.num_heads)
        pairs = (len(self.rows), problem.num_keys)
        total = ExactBackward(
            dq=self.zeros(*heads, len(self.rows), problem.head_dim),
            dk=self.zeros(*problem.k.shape),
            dv=self.zeros(*problem.v.shape),
            dbias=None if problem.bias is None else self.zeros(*_bias_shape(problem, len(self.rows))),
            dsink=None if problem.sink is None else self.zeros(problem.num_heads),
            dscale=self.ctx.zero,
            probabilities=self.zeros(*heads, *pairs),
            grad_probabilities=self.zeros(*heads, *pairs),
            grad_scores=self.zeros(*heads, *pairs),
            delta=self.zeros(*heads, len(self.rows)),
            num_rows=len(self.rows),
            bits=self.bits,
        )
        for b in range(problem.batch):
            for h in range(problem.num_heads):
                self.add_head(total, b, h)
        total.dscale *= self.ctx.mpf(problem.q_descale) * self.ctx.mpf(problem.k_descale)
        return total

    def add_head(self, total: ExactBackward, b: int, h: int) -> None:
        problem = self.problem
        head = _Head(problem, b, h, self.bits)
        forward_rows = head.forward(self.rows)
        shape = (problem.num_queries, problem.value_dim)
        dout = head.matrix(torch.zeros(shape) if problem.dout is None else problem.dout[b, h])
        dlse = head.vector(torch.zeros(shape[0]) if problem.dlse is None else problem.dlse[b, h])
        out = forward_rows.out if self.out is None else head.matrix(self.out[b, h, self.rows])
        for r, i in enumerate(self.rows):
            if any(forward_rows.visible[r]):
                self.add_row(total, head, forward_rows, r, dout=dout[i], dlse=dlse[i], out=out[r])

    def add_row(
        self,
        total: ExactBackward,
        head: _Head,
        fwd: ExactForward,
        r: int,
        *,
        dout: Vector,
        dlse: Real,
        out: Vector,
    ) -> None:
        ctx, problem, b, h = self.ctx, self.problem, head.b, head.h
        kv = h // problem.group
        p, p_sink = fwd.probabilities[r], fwd.sink_probability[r]
        if self.lse is not None:
            stored = ctx.mpf(float(self.lse[b, h, self.rows[r]]))
            p = [
                ctx.exp(s - stored) if seen else ctx.zero
                for s, seen in zip(fwd.scores[r], fwd.visible[r], strict=True)
            ]
            p_sink = ctx.zero if head.sink is None else ctx.exp(head.sink - stored)
        delta = ctx.fdot(dout, out) - dlse
        total.delta[b][h][r] = delta
        if total.dsink is not None:
            total.dsink[h] -= p_sink * delta
        descale = ctx.mpf(problem.v_descale)
        for j, seen in enumerate(fwd.visible[r]):
            if not seen:
                continue
            dp = descale * ctx.fdot(dout, head.v[j])
            ds = p[j] * (dp - delta)
            dx = ds * head.softcap_slope(fwd.products[r][j])
            total.probabilities[b][h][r][j] = p[j]
            total.grad_probabilities[b][h][r][j] = dp
            total.grad_scores[b][h][r][j] = ds
            total.dscale += dx * fwd.raw[r][j]
            if total.dbias is not None:
                _broadcast_add(total.dbias, (b, h, r, j), ds)
            for c in range(problem.head_dim):
                total.dq[b][h][r][c] += head.scale * dx * head.k[j][c]
                total.dk[b][kv][j][c] += head.scale * dx * head.q[self.rows[r]][c]
            for c in range(problem.value_dim):
                total.dv[b][kv][j][c] += descale * p[j] * dout[c]


def _bias_shape(problem: Problem, rows: int) -> tuple[int, ...]:
    """Shape of the bias with ``rows`` query rows, () without a bias."""
    if problem.bias is None:
        return ()
    b, h, queries, keys = problem.bias.shape
    return b, h, rows if queries > 1 else queries, keys


def _broadcast_add(target: Any, index: tuple[int, ...], value: Real) -> None:
    """Add to ``target[index]``, index 0 where a dimension of ``target`` is broadcast."""
    *outer, last = index
    for n in outer:
        target = target[n if len(target) > 1 else 0]
    target[last if len(target) > 1 else 0] += value
