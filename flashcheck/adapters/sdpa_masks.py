"""Turns a problem's masks into what ``scaled_dot_product_attention`` takes: one additive tensor."""

from __future__ import annotations

import torch
from torch import Tensor

from flashcheck.problem import Problem


def additive_mask(problem: Problem, *, fold_causal: bool) -> Tensor | None:
    """Mask and bias as one fp32 tensor to add to the scores, -inf where hidden; None if neither is set.

    Shape (batch or 1, heads or 1, Nq or 1, Nk or 1). fp32 holds every fp32, fp16 and bf16 bias exactly,
    and the back ends add it in fp32.

    Args:
        problem: whose ``mask`` and ``bias`` are taken.
        fold_causal: write a top-left causal mask into the tensor too, for a back end that refuses an
            explicit mask next to ``is_causal``.
    """
    hidden: Tensor | None = None if problem.mask is None else ~problem.mask
    if fold_causal and problem.causal is not None:
        i = torch.arange(problem.num_queries).view(1, 1, -1, 1)
        j = torch.arange(problem.num_keys).view(1, 1, 1, -1)
        future = (j > i).to(problem.q.device)
        hidden = future if hidden is None else hidden | future
    if hidden is None and problem.bias is None:
        return None
    bias = torch.zeros((), device=problem.q.device) if problem.bias is None else problem.bias.float()
    if hidden is None:
        return bias
    return torch.where(hidden, -torch.inf, bias)
