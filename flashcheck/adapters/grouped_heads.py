"""Grouped key/value heads for kernels that take as many key heads as query heads."""

from __future__ import annotations

from torch import Tensor

from flashcheck.problem import Problem


def expanded_heads(problem: Problem) -> tuple[Tensor, Tensor]:
    """k and v repeated for every query head of a group, as ``enable_gqa=True`` does."""
    if problem.group == 1:
        return problem.k, problem.v
    return (
        problem.k.repeat_interleave(problem.group, dim=1),
        problem.v.repeat_interleave(problem.group, dim=1),
    )


def summed_group(gradient: Tensor, group: int) -> Tensor:
    """Gradients summed over the query heads of a group: autograd's rule for ``expanded_heads``."""
    if group == 1:
        return gradient
    batch, heads, length, dim = gradient.shape
    return gradient.reshape(batch, heads // group, group, length, dim).sum(2)
