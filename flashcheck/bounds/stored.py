"""What rounding into the output's format leaves of a value that is known but for a small noise.

Where the noise is far below the spacing of the format, the rounding is no noise of its own: it is a staircase
of the exact value, and values within one spacing of each other are all moved towards the same number.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from flashcheck.formats import Format, half_ulp, round_nearest

_STEPS = 3
"""Boundaries on either side that are counted: noise up to half a spacing crosses no more of them."""
_SMOOTH = 0.5
"""Noise, in spacings, past which the staircase is a straight line to 1e-2 of a spacing."""


@dataclass(frozen=True, slots=True)
class Stored:
    """Of RN(x + noise), per element: its mean, the derivative of the mean by x, and its variance."""

    mean: Tensor
    slope: Tensor
    variance: Tensor


def stored(exact: Tensor, variance: Tensor, fmt: Format) -> Stored:
    """Normal noise of ``variance`` around ``exact``, float64, rounded into ``fmt``.

    Source: THEORY.md section 9.
    """
    spacing = 2 * half_ulp(exact, fmt)
    nearest = round_nearest(exact, fmt)
    deviation = variance.sqrt().clamp(min=1e-12 * spacing.clamp(min=1e-300))
    offset = (exact - nearest) / spacing
    scaled = deviation / spacing
    mean = torch.full_like(exact, -float(_STEPS))
    slope, square = torch.zeros_like(exact), torch.zeros_like(exact)
    for number, step in enumerate(range(-_STEPS, _STEPS)):
        distance = (offset - (step + 0.5)) / scaled
        passed = torch.special.ndtr(distance)
        mean += passed
        square += (2 * number + 1) * passed
        slope += torch.exp(-distance.square() / 2) / (math.sqrt(2 * math.pi) * scaled)
    count = mean + _STEPS
    smooth = scaled > _SMOOTH
    return Stored(
        mean=torch.where(smooth, exact, nearest + mean * spacing),
        slope=torch.where(smooth, 1.0, slope),
        variance=torch.where(
            smooth, variance + spacing.square() / 12, (square - count.square()) * spacing.square()
        ),
    )
