"""Sums of W |v - O| from matrix products: THEORY.md section 3.4."""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from flashcheck.bounds.products import by_head, by_kv_head, per_head
from flashcheck.problem import Problem


class Deviations:
    """Distances |v_jd - O_id| of the values from the output of each row.

    Args:
        values: (B, Hkv, n, dv); out: (B, H, Nq, dv); float64.
    """

    def __init__(self, problem: Problem, values: Tensor, out: Tensor) -> None:
        self.problem, self.out = problem, out
        highest, lowest = values.amax(-2, keepdim=True), values.amin(-2, keepdim=True)
        # A constant taken from the values and from O alike changes no distance. Where the values of a
        # column lie close together, far from 0, it keeps the sum of squares from cancelling.
        middle = 0.5 * highest + 0.5 * lowest
        middle = torch.where(middle.abs() > highest - lowest, middle, 0.0)
        centred = values - middle
        self._powers = torch.cat([centred.abs(), centred.square(), centred], -1)
        self._out = by_kv_head(problem, out) - middle
        self._out_square = self._out.square()
        self.most = per_head(problem, torch.maximum(highest.abs(), lowest.abs()))
        self._ends = highest, lowest

    @cached_property
    def hull(self) -> Tensor:
        """(B, H, Nq, dv) the largest distance: a convex combination of the values errs by no more."""
        highest, lowest = (per_head(self.problem, x) for x in self._ends)
        return torch.maximum(highest - self.out, self.out - lowest).clamp_(min=0.0)

    def weighted(self, weight: Tensor) -> Tensor:
        """Upper limit of sum_j W_ij |v_jd - O_id| for weights (B, H, Nq, n) >= 0.

        The smaller of W|V| + |O| sum W (triangle) and sqrt(sum W * sum W (v - O)^2) (Cauchy-Schwarz).
        """
        weight = by_kv_head(self.problem, weight)
        total = weight.sum(-1, keepdim=True)
        absolute, square, plain = (weight @ self._powers).chunk(3, -1)
        triangle = torch.addcmul(absolute, self._out.abs(), total)
        size = torch.addcmul(square, self._out_square, total)
        # The digits that the products and their difference lose: THEORY.md 2.6.
        lost = (weight.shape[-1] + 16) * 2.0**-52
        variance = torch.addcmul(size, self._out, plain, value=-2).clamp_(min=0.0).add_(size, alpha=lost)
        limit = torch.minimum(triangle, variance.mul_(total).sqrt_().nan_to_num_(torch.inf))
        return by_head(self.problem, limit)

    def variance(self, weight: Tensor) -> Tensor:
        """About sum_j W_ij (v_jd - O_id)^2."""
        weight = by_kv_head(self.problem, weight)
        dim = self.out.shape[-1]
        square, plain = (weight @ self._powers[..., dim:]).chunk(2, -1)
        total = weight.sum(-1, keepdim=True)
        variance = torch.addcmul(square, self._out_square, total)
        return by_head(self.problem, variance.addcmul_(self._out, plain, value=-2).clamp_(min=0.0))
