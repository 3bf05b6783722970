"""Sums of products that are exact in any order, in every rung: 8- and 16-bit inputs of ordinary spread."""

from __future__ import annotations

import torch
from torch import Tensor

EVALUATION = 1.0 + 2.0**-20
"""Covers the roundings of evaluating a bound itself, a sum of magnitudes, and the products of two first-order
roundings: each is below 2^-21 relative for lengths up to 2^30."""


_SIGNIFICAND = (1 << 52) - 1
_SMALLEST_NORMAL = 2.0**-1022


def lowest_bit(x: Tensor) -> Tensor:
    """Value of the lowest bit set in a row (last dimension): 0 if an entry is subnormal, inf if all are 0."""
    size = x.abs().contiguous()
    bits = size.view(torch.int64)
    # Without its lowest bit, if that is not the hidden one.
    rest = (bits & (bits - 1)).view(torch.float64)
    lowest = torch.where(bits & _SIGNIFICAND == 0, size, size - rest)
    if size.numel() and float(size.amin()) < _SMALLEST_NORMAL:
        lowest = torch.where(size < _SMALLEST_NORMAL, 0.0, lowest)
        lowest = torch.where(size == 0, torch.inf, lowest)
    return lowest.amin(-1)


def product_is_exact(a: Tensor, b: Tensor) -> bool:
    """Every partial sum of a @ b, (..., n, K) @ (..., K, m), is a float64 number.

    All products of an element are multiples of one power of two, and their magnitudes add up to less than
    2^53 of it.
    """
    if not a.shape[-1] or not a.numel() or not b.numel():
        return False
    unit = lowest_bit(a).unsqueeze(-1) * lowest_bit(b.mT).unsqueeze(-2)
    return bool((a.abs() @ b.abs() * EVALUATION < 2.0**53 * unit).all())
