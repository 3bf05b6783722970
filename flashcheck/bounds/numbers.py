"""Constants and total functions that every bound uses (THEORY.md section 2)."""

from __future__ import annotations

import torch
from torch import Tensor

from flashcheck.arithmetic import Machine

FP32_MAX = float(torch.finfo(torch.float32).max)
UNIT = 2.0**-24 * (1.0 + 2.0**-20)
"""u of fp32, with room for the second-order terms of up to 2^4 factors (1 + u)."""

SMALLEST_FP32 = 2.0**-149
SMALLEST_NORMAL_FP32 = 2.0**-126


def flushed(machine: Machine) -> float:
    """What an fp32 operation outside the matrix unit loses at most for each subnormal operand and for a
    subnormal result: 2^-126, or 0 where it keeps them (THEORY.md 2.3)."""
    return SMALLEST_NORMAL_FP32 if machine.vector.flush_subnormals else 0.0


ORACLE_SHARE = 1.0 + 2.0**-26
"""Factor on every score error: it pays for the float64 oracle, whose error has the same form with
2^-53 in the place of 2^-24 (THEORY.md section 2.5)."""

LARGEST_LINEAR = 2.0**-6
"""Where logarithms of factors stay below this, exp(x) - 1 <= x (1 + 2^-6) and exp(-x) >= 1 - x replace
exponentials (THEORY.md section 2.6), and predictions are first order."""

FEW = 1 << 13
"""Elements up to which tensors are worth joining: a step over them costs little more than its call."""

LARGEST_EXPONENT = 700.0  # exp(700) is finite in float64; an error of e^700 is "anything" for every format


def exp_clipped(x: Tensor) -> Tensor:
    """exp(min(x, 700))."""
    return torch.exp(x.clamp(max=LARGEST_EXPONENT))


def expm1_clipped(x: Tensor) -> Tensor:
    """expm1(min(x, 700)); 0 for x = 0, so exact inputs stay exact."""
    return torch.expm1(x.clamp(max=LARGEST_EXPONENT))


def weighted_growth(log_weight: Tensor, error: Tensor) -> Tensor:
    """exp(log_weight) * (exp(error) - 1) without losing weights that underflow or errors that overflow."""
    small = torch.exp(log_weight) * expm1_clipped(error)
    large = exp_clipped(log_weight + error)
    return torch.where(error < 1.0, small, large)
