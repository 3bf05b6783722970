"""Rows of weights so alike that their roundings into P's format all go one way: THEORY.md section 6."""

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
