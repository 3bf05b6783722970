"""The last rung's backward: analytic gradients in mpmath, one head at a time."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flashcheck.formats import to_float64
from flashcheck.oracle.mp_head import (
    ExactForward,
    Head,
    Matrix,
    Real,
    Vector,
    columns,
    context_of,
    to_tensor,
    working_bits,
)
from flashcheck.oracle.quantities import BackwardQuantities
from flashcheck.problem import Problem


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


class _Backward:
    """Accumulates the gradients over the heads of one problem."""

    def __init__(
        self, problem: Problem, out: Tensor | None, lse: Tensor | None, rows: list[int], bits: int
    ) -> None:
        self.problem, self.out, self.lse, self.rows, self.bits = problem, out, lse, rows, bits
        self.ctx = context_of(bits)

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
        problem, ctx = self.problem, self.ctx
        head = Head(problem, b, h, self.rows, self.bits)
        fwd = head.forward()
        shape = (problem.num_queries, problem.value_dim)
        dout = torch.zeros(shape) if problem.dout is None else problem.dout[b, h]
        dlse = torch.zeros(shape[0]) if problem.dlse is None else problem.dlse[b, h]
        alive = torch.tensor([any(row) for row in fwd.visible], dtype=torch.bool)
        douts = head.matrix(torch.where(alive.unsqueeze(-1), to_float64(dout)[self.rows], 0.0))
        dlses = head.vector(torch.where(alive, to_float64(dlse)[self.rows], 0.0))
        outs = fwd.out if self.out is None else head.matrix(self.out[b, h, self.rows])
        dx: Matrix = []
        for r, live in enumerate(alive.tolist()):
            if live:
                total.delta[b][h][r] = ctx.fdot(douts[r], outs[r]) - dlses[r]
            dx.append(self.add_row(total, head, fwd, r, dout=douts[r]))

        dq, dk, dv = total.dq[b][h], total.dk[b][h // problem.group], total.dv[b][h // problem.group]
        keys, queries = (
            columns(head.k, problem.head_dim),
            columns(head.q, problem.head_dim),
        )
        for r, row in enumerate(dx):
            dq[r] = [head.scale * ctx.fdot(row, column) for column in keys]
        by_key = zip(
            columns(dx, problem.num_keys), columns(total.probabilities[b][h], problem.num_keys), strict=True
        )
        descale = ctx.mpf(problem.v_descale)
        for j, (dx_column, p_column) in enumerate(by_key):
            dk[j] = [x + head.scale * ctx.fdot(dx_column, c) for x, c in zip(dk[j], queries, strict=True)]
            grads = columns(douts, problem.value_dim)
            dv[j] = [x + descale * ctx.fdot(p_column, c) for x, c in zip(dv[j], grads, strict=True)]

    def add_row(self, total: ExactBackward, head: Head, fwd: ExactForward, r: int, *, dout: Vector) -> Vector:
        """Row r's dX, zero where hidden; its other fields, dbias, dsink and dscale go into ``total``."""
        ctx, problem, b, h = self.ctx, self.problem, head.b, head.h
        dx = [ctx.zero] * problem.num_keys
        if not any(fwd.visible[r]):
            return dx
        p, p_sink, delta = fwd.probabilities[r], fwd.sink_probability[r], total.delta[b][h][r]
        if self.lse is not None:
            stored = ctx.mpf(float(self.lse[b, h, self.rows[r]]))
            p = [
                ctx.exp(s - stored) if seen else ctx.zero
                for s, seen in zip(fwd.scores[r], fwd.visible[r], strict=True)
            ]
            p_sink = ctx.zero if head.sink is None else ctx.exp(head.sink - stored)
        if total.dsink is not None:
            total.dsink[h] -= p_sink * delta
        descale = ctx.mpf(problem.v_descale)
        total.probabilities[b][h][r] = p
        for j, seen in enumerate(fwd.visible[r]):
            if not seen:
                continue
            dp = descale * ctx.fdot(dout, head.v[j])
            ds = p[j] * (dp - delta)
            dx[j] = ds * head.softcap_slope(fwd.products[r][j])
            total.grad_probabilities[b][h][r][j] = dp
            total.grad_scores[b][h][r][j] = ds
            total.dscale += dx[j] * fwd.raw[r][j]
            if total.dbias is not None:
                _broadcast_add(total.dbias, (b, h, r, j), ds)
        return dx


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
