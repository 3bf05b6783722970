"""Matrix products that the bounds are made of, grouped heads included, in float64 (THEORY.md 2.5)."""

from __future__ import annotations

from torch import Tensor

from flashcheck.problem import Problem


def by_kv_head(problem: Problem, x: Tensor) -> Tensor:
    """(B, H, N, ...) as (B, Hkv, group * N, ...)."""
    if problem.group == 1:
        return x
    return x.reshape(x.shape[0], problem.num_kv_heads, problem.group * x.shape[2], *x.shape[3:])


def by_head(problem: Problem, x: Tensor) -> Tensor:
    """The inverse of ``by_kv_head``."""
    if problem.group == 1:
        return x
    return x.reshape(x.shape[0], problem.num_heads, x.shape[2] // problem.group, *x.shape[3:])


def per_head(problem: Problem, x: Tensor) -> Tensor:
    """(B, Hkv, ...) as (B, H, ...): what the query heads of a group share."""
    return x if problem.group == 1 else x.repeat_interleave(problem.group, 1)


def weighted(problem: Problem, weight: Tensor, values: Tensor) -> Tensor:
    """weight (B, H, Nq, n) @ values (B, Hkv, n, d)."""
    if weight.shape[1] == values.shape[1]:
        return weight @ values
    return by_head(problem, by_kv_head(problem, weight) @ values)
