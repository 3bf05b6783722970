"""What summing products costs on average: variance and bias of a unit's sums. THEORY.md section 5."""

from __future__ import annotations

import torch
from torch import Tensor

from flashcheck.arithmetic import Accumulator

ROUNDING_RMS = 0.4247
"""rms of the relative error of rounding to nearest, in units of u, for a log-uniform significand."""

BINADE = 0.541
"""Mean of (2^floor(log2 x) / x)^2 for a log-uniform x."""

LARGEST_PRODUCT = 12.0
"""Mean square of the largest of a few dozen products of normal numbers, over that of all."""


def accumulation_weights(unit: Accumulator, terms: int) -> tuple[float, float]:
    """(a, b) with a total^2 + b sum of squares: the variance of summing ``terms`` products to ``total``.

    Each partial sum of a sequential summation is rounded once. Sums that are split over lanes err less:
    this is the upper end.
    """
    steps = -(-terms // unit.block)
    if unit.fraction_bits is None or not steps:
        return storing_weights(unit, steps)
    ends, bridge = partial_weights(steps)
    stored = _storing(unit)
    # Each of K + 1 addends loses up to 2^-F of the binade of the largest of them, a third of that
    # squared on average; the largest is the sum so far, or a product (LARGEST_PRODUCT).
    lost = (unit.block + 1) / 3 * BINADE * 4.0**-unit.fraction_bits
    return stored * ends + lost * (ends - 1), (stored + lost) * bridge + lost * LARGEST_PRODUCT / unit.block


def storing_weights(unit: Accumulator, steps: int) -> tuple[float, float]:
    """``accumulation_weights`` of storing the sum after each step, without what alignment loses."""
    ends, bridge = partial_weights(steps)
    return _storing(unit) * ends, _storing(unit) * bridge


def _storing(unit: Accumulator) -> float:
    share = 1.0 if unit.rounding == "nearest" else 0.25
    return share * (ROUNDING_RMS * unit.step_error) ** 2


def accumulation_variance(unit: Accumulator, terms: int, total: Tensor, squares: Tensor) -> Tensor:
    """Variance of summing ``terms`` products to ``total``; ``squares``: sum of squares."""
    ends, bridge = accumulation_weights(unit, terms)
    return (squares * bridge).addcmul_(total, total, value=ends)


def partial_squares(steps: int, total: Tensor, squares: Tensor) -> Tensor:
    """Expected sum of S_k^2 over the partial sums of ``steps`` equal parts, given where they end.

    The terms in random order, the last sum S known: E S_k^2 = (k/n)^2 S^2 + (k/n)(1 - k/n) Q with
    Q = ``squares``, the sum of squared terms (a Brownian bridge).
    """
    ends, bridge = partial_weights(steps)
    return ends * total.square() + bridge * squares


def partial_weights(steps: int) -> tuple[float, float]:
    """(a, b) with a S^2 + b Q = ``partial_squares``."""
    if steps < 1:
        return 0.0, 0.0
    return (steps + 1) * (2 * steps + 1) / (6 * steps), (steps * steps - 1) / (6 * steps)


def accumulation_bias(unit: Accumulator, terms: int, total: Tensor) -> Tensor:
    """Mean error of a sum whose partial sums are truncated: 0.36 of a spacing at each, toward zero."""
    if unit.rounding == "nearest":
        return torch.zeros_like(total)
    steps = -(-terms // unit.block)
    return -0.36 * unit.step_error * (steps + 1) / 2 * total
