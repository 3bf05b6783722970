"""Weights whose roundings into P's format are not independent of each other: THEORY.md sections 6 and 9."""

from __future__ import annotations

import torch
from torch import Tensor

from flashcheck.formats import Format
from flashcheck.oracle.quantities import ForwardQuantities


def alike_weights(exact: ForwardQuantities, fmt: Format) -> Tensor:
    """Rows (B, H, Nq, 1) whose weights scatter by no more than one spacing of ``fmt``.

    Their roundings are no noise: they lean, and they follow the scores. A spacing is at most twice the unit
    roundoff of the number. A row that sees no key counts as one.
    """
    count = exact.visible.sum(-1, keepdim=True).clamp(min=1)
    mean = exact.probabilities.sum(-1, keepdim=True) / count
    spread = torch.where(exact.visible, exact.probabilities - mean, 0.0).square().sum(-1, keepdim=True)
    return (spread / count).sqrt() <= 2 * fmt.unit_roundoff * mean


def summed_variance(weighting: Tensor, variance: Tensor, log_size: Tensor) -> float:
    """Of sum(weighting * errors): rounding errors of weights, each with its ``variance``, the same one for
    weights that are the same number. Rows that share their scores (a scale of 0 with a bias or ALiBi) round
    alike, whatever their values and sums are.

    Equal weights that the kernel computes by different ways may differ by an fp32 rounding and then share
    their error or not: the larger of both counts.

    Args:
        weighting, variance, log_size: one shape; the weight that is rounded is exp(-log_size), and
            log_size is inf where there is none. A weight of 1 is stored as it is: only fp32 errors, which
            are each row's own, move it.

    Source: THEORY.md section 9.
    """
    errors = weighting * variance.sqrt()
    rounded = log_size > 0
    alone, shared = errors[~rounded], errors[rounded]
    # The oracle's scores of equal pairs agree to 2^-30; other weights hardly ever do.
    _, group = torch.unique((log_size[rounded] * 2.0**30).round_(), return_inverse=True)
    together = torch.zeros_like(shared).index_add_(0, group, shared)
    return float(alone.square().sum() + torch.maximum(shared.square().sum(), together.square().sum()))
