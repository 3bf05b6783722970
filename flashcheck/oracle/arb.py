"""A second opinion on the last rung: rigorous balls by python-flint (``pip install flashcheck[arb]``).

Every value is a ball [mid +/- rad] that contains the exact one; the library proves the radius, not
this package. Matrix products make it much faster than mpmath. It shares no formula code with the
other rungs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flashcheck.errors import ArgumentError
from flashcheck.formats import to_float64
from flashcheck.oracle.exact import working_bits
from flashcheck.problem import Problem

try:
    import flint
except ImportError:
    flint = None  # type: ignore[assignment]

_COMPARE_BITS = 4096

Ball = Any  # flint.arb
BallMatrix = Any  # flint.arb_mat
Nested = Any  # nested lists of balls, shaped like a tensor


@dataclass(frozen=True, slots=True)
class ArbForward:
    """All heads as nested lists of balls.

    out (B, H, Nq, dv), lse (B, H, Nq), probabilities (B, H, Nq, Nk); ``bits``: the precision.
    """

    out: Nested
    lse: Nested
    probabilities: Nested
    bits: int


@dataclass(frozen=True, slots=True)
class ArbBackward:
    """Gradients as nested lists of balls; shapes as in ``BackwardQuantities``."""

    dq: Nested
    dk: Nested
    dv: Nested
    dbias: Nested | None
    dsink: Nested | None
    dscale: Ball
    bits: int


def forward(problem: Problem, bits: int | None = None) -> ArbForward:
    """Every head at ``bits`` bits (None: chosen from the problem, as for mpmath)."""
    _require_flint()
    bits = working_bits(problem) if bits is None else bits
    with flint.ctx.workprec(bits):
        heads = [
            [_Head(problem, b, h).forward() for h in range(problem.num_heads)] for b in range(problem.batch)
        ]
    return ArbForward(
        out=[[head.out.tolist() for head in batch] for batch in heads],
        lse=[[head.lse for head in batch] for batch in heads],
        probabilities=[[head.p.tolist() for head in batch] for batch in heads],
        bits=bits,
    )


def backward(
    problem: Problem, out: Tensor | None = None, lse: Tensor | None = None, bits: int | None = None
) -> ArbBackward:
    """Gradients; ``out`` and ``lse`` as in ``fp64.backward``."""
    _require_flint()
    bits = working_bits(problem) if bits is None else bits
    with flint.ctx.workprec(bits):
        return _backward(problem, out, lse, bits)


def midpoints(balls: Nested) -> Tensor:
    """Midpoints as float64."""
    return torch.tensor(_each(balls, lambda x: float(x.mid())), dtype=torch.float64)


def radii(balls: Nested) -> Tensor:
    """Radii as float64, rounded up."""
    return torch.tensor(_each(balls, lambda x: float(x.rad()) * (1 + 2.0**-20)), dtype=torch.float64)


def contains(ball: Ball, value: Any, slack: float) -> bool:
    """True where the ball widened by ``slack`` contains the mpf ``value``."""
    with flint.ctx.workprec(_COMPARE_BITS):  # the sum is rounded to the precision in force
        return bool((ball + flint.arb(0, slack)).overlaps(flint.arb(value)))


def _require_flint() -> None:
    if flint is None:
        raise ArgumentError("python-flint", "not installed", "pip install flashcheck[arb]")


def _each(values: Nested, f: Any) -> Any:
    return [_each(x, f) for x in values] if isinstance(values, list) else f(values)


def _matrix(x: Tensor) -> BallMatrix:
    """A float64 matrix, exactly; non-finite entries (which no row sees) as 0."""
    x = torch.nan_to_num(to_float64(x), nan=0.0, posinf=0.0, neginf=0.0)
    return flint.arb_mat(x.shape[0], x.shape[1], [flint.arb(v) for v in x.flatten().tolist()])


def _build(rows: int, columns: int, entry: Any) -> BallMatrix:
    return flint.arb_mat(rows, columns, [entry(i, j) for i in range(rows) for j in range(columns)])


def _scaled(m: BallMatrix, factor: Ball) -> BallMatrix:
    return _build(m.nrows(), m.ncols(), lambda i, j: m[i, j] * factor)


class _Head:
    """One head's operands and, after ``forward``, its softmax."""

    out: BallMatrix
    p: BallMatrix

    def __init__(self, problem: Problem, b: int, h: int) -> None:
        arb, kv = flint.arb, h // problem.group
        self.problem, self.b, self.h = problem, b, h
        self.rows, self.keys = problem.num_queries, problem.num_keys
        self.q, self.k, self.v = (_matrix(x) for x in (problem.q[b, h], problem.k[b, kv], problem.v[b, kv]))
        self.scale, self.v_descale = arb(problem.effective_scale), arb(problem.v_descale)
        self.sink = None if problem.sink is None else arb(float(problem.sink[h]))
        self.visible = problem.visible()[b, h].tolist()
        self.raw = self.q * self.k.transpose()
        self.lse: list[Ball] = []
        self.sink_p: list[Ball] = []

    def score(self, i: int, j: int) -> Ball:
        problem, arb = self.problem, flint.arb
        x = self.raw[i, j] * self.scale
        if problem.softcap is not None:
            cap = arb(problem.softcap)
            x = (x / cap).tanh() * cap
        if problem.bias is not None:
            place = (
                n if size > 1 else 0
                for n, size in zip((self.b, self.h, i, j), problem.bias.shape, strict=True)
            )
            x = x + arb(float(problem.bias[tuple(place)]))
        if problem.alibi_slopes is not None:
            slopes = problem.alibi_slopes
            slope = slopes[self.h] if slopes.ndim == 1 else slopes[self.b, self.h]
            aligned = int(problem.diagonal("bottom_right").key_of(torch.tensor([i])))
            x = x - arb(float(slope)) * abs(aligned - j)
        return x

    def forward(self) -> _Head:
        zero = flint.arb(0)
        rows = []
        self.scores: list[list[Ball | None]] = []
        for i in range(self.rows):
            scores = [self.score(i, j) if self.visible[i][j] else None for j in range(self.keys)]
            logits = [s for s in scores if s is not None] + ([] if self.sink is None else [self.sink])
            self.scores.append(scores)
            if not logits:
                rows.append([zero] * self.keys)
                self.lse.append(flint.arb.neg_inf())
                self.sink_p.append(zero)
                continue
            shift = max(s.mid() for s in logits)  # any shift is right; a midpoint is exact
            weights = [zero if s is None else (s - shift).exp() for s in scores]
            sink = zero if self.sink is None else (self.sink - shift).exp()
            total = sum(weights, sink)
            rows.append([w / total for w in weights])
            self.lse.append(shift + total.log())
            self.sink_p.append(sink / total)
        self.p = flint.arb_mat(self.rows, self.keys, [x for row in rows for x in row])
        self.out = _scaled(self.p * self.v, self.v_descale)
        return self

    def condition(self, lse: Tensor) -> None:
        """Replace the probabilities by exp(s - lse) with the stored log-sum-exp (Nq,)."""
        stored = [flint.arb(x) if x - x == 0 else flint.arb(0) for x in to_float64(lse).tolist()]
        zero = flint.arb(0)

        def probability(i: int, j: int) -> Ball:
            s = self.scores[i][j]
            return zero if s is None else (s - stored[i]).exp()

        self.p = _build(self.rows, self.keys, probability)
        self.sink_p = [zero if self.sink is None else (self.sink - x).exp() for x in stored]

    def slope(self, i: int, j: int) -> Ball:
        if self.problem.softcap is None:
            return flint.arb(1)
        return (self.raw[i, j] * self.scale / flint.arb(self.problem.softcap)).sech() ** 2


def _zeros(*shape: int) -> Nested:
    return [_zeros(*shape[1:]) for _ in range(shape[0])] if shape else flint.arb(0)


def _backward(problem: Problem, out: Tensor | None, lse: Tensor | None, bits: int) -> ArbBackward:
    arb, heads = flint.arb, range(problem.num_heads)
    keys = problem.num_keys
    dbias = None if problem.bias is None else _zeros(*problem.bias.shape)
    dsink = None if problem.sink is None else _zeros(problem.num_heads)
    dscale = arb(0)
    dq: Nested = []
    dk: Nested = []
    dv: Nested = []
    for b in range(problem.batch):
        dq.append([])
        dk_sum = [flint.arb_mat(keys, problem.head_dim) for _ in range(problem.num_kv_heads)]
        dv_sum = [flint.arb_mat(keys, problem.value_dim) for _ in range(problem.num_kv_heads)]
        for h in heads:
            head, kv = _Head(problem, b, h).forward(), h // problem.group
            alive = [any(row) for row in head.visible]
            shape = (problem.num_queries, problem.value_dim)
            live = torch.tensor(alive, dtype=torch.bool).view(-1, 1)
            dout = torch.zeros(shape) if problem.dout is None else to_float64(problem.dout[b, h])
            dout_balls = _matrix(torch.where(live, dout, 0.0))
            used = head.out if out is None else _matrix(torch.where(live, to_float64(out[b, h]), 0.0))
            if lse is not None:
                head.condition(lse[b, h])
            delta = _deltas(head, alive, dout_balls, used)
            dp = _scaled(dout_balls * head.v.transpose(), head.v_descale)
            ds = _build(head.rows, keys, lambda i, j: head.p[i, j] * (dp[i, j] - delta[i]))  # noqa: B023
            dx = _build(head.rows, keys, lambda i, j: ds[i, j] * head.slope(i, j))  # noqa: B023
            dq[b].append(_scaled(dx * head.k, head.scale).tolist())
            dk_sum[kv] += _scaled(dx.transpose() * head.q, head.scale)
            dv_sum[kv] += _scaled(head.p.transpose() * dout_balls, head.v_descale)
            for i, j in ((i, j) for i in range(head.rows) for j in range(keys)):
                dscale += dx[i, j] * head.raw[i, j]
                if dbias is not None:
                    _add(dbias, (b, h, i, j), ds[i, j])
            if dsink is not None:
                dsink[h] -= sum(
                    (p * d for p, d, live in zip(head.sink_p, delta, alive, strict=True) if live), arb(0)
                )
        dk.append([m.tolist() for m in dk_sum])
        dv.append([m.tolist() for m in dv_sum])
    dscale *= arb(problem.q_descale) * arb(problem.k_descale)
    return ArbBackward(dq, dk, dv, dbias, dsink, dscale, bits)


def _deltas(head: _Head, alive: list[bool], dout: BallMatrix, out: BallMatrix) -> list[Ball]:
    """rowsum(dO * O) - dLSE of every row, 0 in rows that see no key."""
    problem, zero, deltas = head.problem, flint.arb(0), []
    for i, live in enumerate(alive):
        dlse = 0.0 if problem.dlse is None else float(problem.dlse[head.b, head.h, i])
        products = (dout[i, c] * out[i, c] for c in range(problem.value_dim))
        deltas.append(sum(products, zero) - flint.arb(dlse) if live else zero)
    return deltas


def _add(target: Nested, index: tuple[int, ...], value: Ball) -> None:
    """Add to ``target[index]``, index 0 where a dimension of ``target`` is broadcast."""
    for n in index[:-1]:
        target = target[n if len(target) > 1 else 0]
    target[index[-1] if len(target) > 1 else 0] += value
