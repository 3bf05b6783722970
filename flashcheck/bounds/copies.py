"""Rows that are copies of each other: one observation of the rounding errors, not many that agree."""

from __future__ import annotations

import torch
from torch import Tensor


def distinct_rows(got: Tensor, exact: Tensor) -> Tensor:
    """Boolean (B, H, N): the first of all rows that agree in what was computed and in what is exact.

    Queries with the same visible keys and the same scores (a scale of 0, one visible key), and keys that are
    repeated, round alike. Statistics over rows count each once.

    Args:
        got, exact: (B, H, N, d). Exact values count to fp32: the oracle's last bits may depend on the place.
    """
    flat, near = (x.reshape(-1, x.shape[-1]) for x in (got.double(), exact.float().double()))
    place = torch.arange(1, flat.shape[-1] + 1, dtype=torch.float64, device=flat.device)
    # One number per row, by weights that no two different rows are likely to share; NaN is never a copy.
    keys = (flat * torch.cos(place) + near * torch.sin(3 * place)).sum(-1)
    _, group = torch.unique(keys, return_inverse=True)
    number = torch.arange(len(group), device=group.device)
    first = torch.full_like(number, len(group)).scatter_reduce(0, group, number, "amin")
    return (first[group] == number).view(got.shape[:-1])
