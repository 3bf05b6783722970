"""Matrix products that the bounds are made of, grouped heads included.

A bound needs three digits, not sixteen. Products of non-negative matrices are therefore taken in float32
(five times as fast on a CPU) after every row of the one factor and every column of the other has been
scaled to at most 1, and the result is widened by what that can lose: THEORY.md section 2.6.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flashcheck.problem import Problem

_FLOOR = 2.0**-147  # what a product loses where its factors or it are subnormal


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


def weighted(problem: Problem, weight: Tensor, values: Tensor) -> Tensor:
    """weight (B, H, Nq, n) @ values (B, Hkv, n, d) in float64."""
    return by_head(problem, by_kv_head(problem, weight) @ values)


def weighted_above(problem: Problem, weight: Tensor, values: Tensor) -> Tensor:
    """At least weight @ values, for non-negative factors; shapes as in ``weighted``."""
    return by_head(problem, product_above(by_kv_head(problem, weight), values))


def product_above(a: Tensor, b: Tensor, *, transposed: bool = False) -> Tensor:
    """At least a @ b (``transposed``: a^T @ b) and at most a few parts in 10^5 more, for non-negative
    float64 factors.

    Source: THEORY.md section 2.6.
    """
    across = -2 if transposed else -1
    terms = a.shape[across]
    if not terms or not a.numel() or not b.numel():
        return (a.mT if transposed else a) @ b
    row, column = a.amax(across, keepdim=True), b.amax(-2, keepdim=True)
    limit = (row.mT if transposed else row) * column
    if not (_float32_is_exact(a) and bool(torch.isfinite(limit).all())):
        return (a.mT if transposed else a) @ b
    left = _scaled(a, row)
    scaled = (left.mT if transposed else left) @ _scaled(b, column)
    result = scaled.double()
    result.mul_(1 + (terms + 8) * 2.0**-23).add_(terms * _FLOOR)
    return result.mul_(limit)


def signed_product(a: Tensor, b: Tensor, *, transposed: bool = False) -> Tensor:
    """a @ b (``transposed``: a^T @ b), off by at most (n + 8) 2^-23 of |a| @ |b| (floors apart)."""
    across = -2 if transposed else -1
    if not a.shape[across] or not a.numel() or not b.numel():
        return (a.mT if transposed else a) @ b
    row, column = a.abs().amax(across, keepdim=True), b.abs().amax(-2, keepdim=True)
    limit = (row.mT if transposed else row) * column
    if not (_float32_is_exact(a) and bool(torch.isfinite(limit).all())):
        return (a.mT if transposed else a) @ b
    left = _scaled(a, row)
    return ((left.mT if transposed else left) @ _scaled(b, column)).double().mul_(limit)


def _float32_is_exact(x: Tensor) -> bool:
    """float32 products are that here: not TF32 or bf16 products under the same name, nor flushed to 0."""
    if x.device.type != "cpu" or torch.get_float32_matmul_precision() != "highest":
        return False
    return bool(torch.full((1,), 2.0**-126) * 0.5)


def _scaled(x: Tensor, largest: Tensor) -> Tensor:
    """x / largest in float32; 0 where everything is 0."""
    inverse = torch.where(largest > 2.0**-1000, 1.0 / largest, 0.0)
    out = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    return torch.mul(x, inverse, out=out)
