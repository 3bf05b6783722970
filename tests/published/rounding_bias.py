"""The bias of bf16 sums where several probabilities are exactly 1 (Qiu & Yao 2025, arXiv 2510.04212, 3.3).

Rows whose maximum is attained twice have two unnormalised probabilities of exactly 1. The sum of two bf16
values of one sign and exponent needs one bit more than bf16 has: half of the sums are ties. The other keys'
small contributions, of the same sign, break every tie the same way, away from zero. A kernel that rounds
the unnormalised P V to bf16 therefore errs by +1/4 ulp in the mean (half of the time by half an ulp), where
rounding to nearest has no bias. The paper's remedy moves the reference of the exponentials so that no
probability is 1; then the bias is gone.

The mechanism predicts a quarter of an ulp. It is a fault of that order of operations, not of bf16: after the
division the other keys move the output to either side of the tie, and a correctly rounded output has no bias.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

PREDICTED = 0.25
"""Mean error, in ulp of bf16, away from zero."""


@dataclass(frozen=True)
class Bias:
    """Mean rounding error of the unnormalised output, in ulp, away from zero, and its standard error."""

    mean: float
    standard_error: float


def rows(count: int, dim: int, *, ties: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Scores (count, 1, 8) with ``ties`` equal maxima, and V (count, 8, dim) in bf16: one sign, one exponent.

    The other scores are 12 to 14 lower: enough to break a tie, too little to move a sum by itself.
    """
    generator = torch.Generator().manual_seed(seed)
    scores = -12 - 2 * torch.rand((count, 1, 8), generator=generator, dtype=torch.float64)
    scores[..., :ties] = 0.0
    v = -(2 + 2 * torch.rand((count, 8, dim), generator=generator)).clamp(max=3.98)
    return scores, v.bfloat16()


def bias(*, ties: int, shift: float = 0.0, count: int = 256, dim: int = 128, seed: int = 0) -> Bias:
    """Bias of rounding sum_j exp(s_j - max - shift) v_j to bf16, P in bf16, the sum exact.

    Only the second rounding counts: the sum that is rounded is that of the rounded P.
    """
    scores, v = rows(count, dim, ties=ties, seed=seed)
    p = (scores - shift).exp().bfloat16().double()
    exact = p @ v.double()
    rounded = exact.float().bfloat16().double()
    ulp = torch.exp2(torch.floor(torch.log2(exact.abs())) - 7)
    errors = ((rounded.abs() - exact.abs()) / ulp).flatten()
    return Bias(float(errors.mean()), float(errors.std()) / math.sqrt(len(errors)))
