"""Matrix products that the bounds are made of, grouped heads included.

A bound needs three digits, not sixteen. Products of non-negative matrices are therefore taken in float32
(five times as fast on a CPU) after every row of the one factor and every column of the other has been
scaled to at most 1, and the result is widened by what that can lose: THEORY.md section 2.6.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from flashcheck.problem import Problem

_SMALLEST_NORMAL, _HALF = np.float32(2.0**-126), np.float32(0.5)
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
    scaled = _scaled_product(a, b, _largest(a, across), _largest(b, -2), transposed=transposed)
    if scaled is None:
        return (a.mT if transposed else a) @ b
    result, limit = scaled
    return _widened(result, terms).mul_(limit)


def signed_product(a: Tensor, b: Tensor, *, transposed: bool = False) -> Tensor:
    """a @ b (``transposed``: a^T @ b), off by at most (n + 8) 2^-23 of |a| @ |b| (floors apart)."""
    across = -2 if transposed else -1
    if not a.shape[across] or not a.numel() or not b.numel():
        return (a.mT if transposed else a) @ b
    scaled = _scaled_product(a, b, _largest(a.abs(), across), _largest(b.abs(), -2), transposed=transposed)
    if scaled is None:
        return (a.mT if transposed else a) @ b
    return scaled[0].mul_(scaled[1])


def products_of(weight: Tensor, above: Tensor, signed: Tensor) -> tuple[Tensor, Tensor]:
    """``product_above(weight, above)`` and ``signed_product(weight, signed)``, from one product.

    Args:
        weight: (..., n, m), above: (..., m, d), both non-negative; signed: (..., m, e).
    """
    wide, terms = above.shape[-1], weight.shape[-1]
    if not terms or not weight.numel() or not above.numel() or not signed.numel():
        return weight @ above, weight @ signed
    right = torch.cat([above, signed], -1)
    scaled = _scaled_product(weight, right, _largest(weight, -1), _largest(right.abs(), -2))
    if scaled is None:
        return weight @ above, weight @ signed
    (most, about), (limit, limit_signed) = (x.tensor_split((wide,), -1) for x in scaled)
    return _widened(most, terms).mul_(limit), about * limit_signed


def _scaled_product(
    a: Tensor, b: Tensor, row: Tensor, column: Tensor, *, transposed: bool = False
) -> tuple[Tensor, Tensor] | None:
    """(a / row) @ (b / column) from single precision, as float64, and row * column; None: out of its range.

    Args:
        row: magnitudes of a's rows at most (``transposed``: of its columns), column: of b's columns.
    """
    limit = (row.mT if transposed else row) * column
    # Not below infinity: also NaN.
    if not (_float32_is_exact(a) and float(limit.amax()) < torch.inf):
        return None
    left = _scaled(a, row)
    return ((left.mT if transposed else left) @ _scaled(b, column)).double(), limit


def _widened(scaled: Tensor, terms: int) -> Tensor:
    """A scaled product in single precision, widened by what that can have lost."""
    return scaled.mul_(1 + (terms + 8) * 2.0**-23).add_(terms * _FLOOR)


def _float32_is_exact(x: Tensor) -> bool:
    """float32 products are that here: not TF32 or bf16 products under the same name, nor flushed to 0."""
    if x.device.type != "cpu" or torch.get_float32_matmul_precision() != "highest":
        return False
    return bool(_SMALLEST_NORMAL * _HALF)  # numpy's scalars are an operation of this thread, and cheap


def _largest(magnitude: Tensor, dim: int) -> Tensor:
    """The largest along ``dim``; 2^-1000 in the place of what is smaller, so that it can be divided by."""
    return magnitude.amax(dim, keepdim=True).clamp_(min=2.0**-1000)


def _scaled(x: Tensor, largest: Tensor) -> Tensor:
    """x / largest in float32."""
    out = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    return torch.mul(x, largest.reciprocal(), out=out)
