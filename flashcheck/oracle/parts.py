"""Cutting a problem along batch and key heads: what the ladder climbs with."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from flashcheck.oracle.operands import Operands, by_kv_head
from flashcheck.problem import Problem


def heads_of(problem: Problem, kv_head: int) -> slice:
    """The query heads that read key head ``kv_head``."""
    return slice(kv_head * problem.group, (kv_head + 1) * problem.group)


def part(problem: Problem, b: int, heads: slice) -> Problem:
    """The problem of some query heads of one batch that share a key head, options included."""
    kv = heads.start // problem.group

    def cut(x: Tensor | None) -> Tensor | None:
        """A tensor over (batch or 1, heads or 1, ...)."""
        if x is None:
            return None
        x = x[b : b + 1] if x.shape[0] > 1 else x
        return x[:, heads] if x.shape[1] > 1 else x

    slopes = problem.alibi_slopes
    if slopes is not None:
        slopes = slopes[heads] if slopes.ndim == 1 else slopes[b : b + 1, heads]
    lengths = problem.key_lengths
    return problem.replaced(
        q=problem.q[b : b + 1, heads],
        k=problem.k[b : b + 1, kv : kv + 1],
        v=problem.v[b : b + 1, kv : kv + 1],
        mask=cut(problem.mask),
        bias=cut(problem.bias),
        alibi_slopes=slopes,
        sink=None if problem.sink is None else problem.sink[heads],
        key_lengths=None if lengths is None else lengths[b : b + 1],
        dout=None if problem.dout is None else problem.dout[b : b + 1, heads],
        dlse=None if problem.dlse is None else problem.dlse[b : b + 1, heads],
    )


def row_blocks(problem: Problem, heads: int, budget: int) -> Iterator[Tensor]:
    """Query rows in blocks whose (heads, rows, Nk) float64 tensors take at most ``budget`` bytes each.

    A block has at least one row, so memory stays linear in the length whatever the budget.
    """
    size = max(1, budget // max(8 * heads * problem.num_keys, 1))
    for start in range(0, problem.num_queries, size):
        yield torch.arange(start, min(start + size, problem.num_queries))


def finite_rows(problem: Problem, x: Operands) -> Tensor:
    """(B, H, R): rows whose query and all that it sees are finite.

    Other rows have no error to bound: IEEE rules in float64 already say where NaN and inf go.
    """
    bad_keys = ~(torch.isfinite(x.k).all(-1) & torch.isfinite(x.v).all(-1))
    bad_pairs = by_kv_head(problem, x.visible) & bad_keys.unsqueeze(2)
    bad = bad_pairs.any(-1).reshape(x.visible.shape[:3])
    if x.bias is not None:
        bad = bad | (x.visible & ~torch.isfinite(x.bias)).any(-1)
    if x.sink is not None:
        bad = bad | ~torch.isfinite(x.sink)
    finite = torch.isfinite(x.q).all(-1) & torch.isfinite(x.dout).all(-1) & torch.isfinite(x.dlse)
    return finite & ~bad
