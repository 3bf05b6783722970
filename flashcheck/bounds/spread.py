"""Sums of W |v - O| from matrix products: THEORY.md section 3.4."""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from flashcheck.bounds.products import by_head, by_kv_head, products_of
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
        # column lie close together, far from 0, it keeps products of single precision from cancelling.
        middle = 0.5 * highest + 0.5 * lowest
        middle = torch.where(middle.abs() > highest - lowest, middle, 0.0)
        centred = values - middle
        self._values, self._square = centred, centred.square()
        self._stacked = torch.cat([centred.abs(), self._square], -1)
        self._out = by_kv_head(problem, out) - middle
        self._out_square = self._out.square()
        self.most = torch.maximum(highest.abs(), lowest.abs()).repeat_interleave(problem.group, 1)
        self._ends = highest, lowest

    @cached_property
    def hull(self) -> Tensor:
        """(B, H, Nq, dv) the largest distance: a convex combination of the values errs by no more."""
        highest, lowest = (x.repeat_interleave(self.problem.group, 1) for x in self._ends)
        return torch.maximum(highest - self.out, self.out - lowest).clamp_(min=0.0)

    def weighted(self, weight: Tensor, *, precise: bool = False) -> Tensor:
        """Upper limit of sum_j W_ij |v_jd - O_id| for weights (B, H, Nq, n) >= 0.

        The smaller of W|V| + |O| sum W (triangle) and sqrt(sum W * sum W (v - O)^2) (Cauchy-Schwarz).
        ``precise``: from products of double precision, which rows with few keys need for fp32 outputs.
        """
        weight = by_kv_head(self.problem, weight)
        total = weight.sum(-1, keepdim=True)
        if precise:
            absolute, square = (weight @ self._stacked).chunk(2, -1)
            plain, digits = weight @ self._values, 1e-14
        else:
            above, plain = products_of(weight, self._stacked, self._values)
            absolute, square = above.chunk(2, -1)
            digits = (weight.shape[-1] + 16) * 2.0**-23
        triangle = absolute + self._out.abs() * total
        centre = self._out_square * total
        # The lost digits of the signed product, and of the difference: THEORY.md 2.6.
        lost = digits * (square + centre)
        variance = (square - 2 * self._out * plain + centre).clamp_(min=0.0) + lost
        limit = torch.minimum(triangle, (total * variance).sqrt().nan_to_num(torch.inf))
        return by_head(self.problem, limit)

    def variance(self, weight: Tensor) -> Tensor:
        """About sum_j W_ij (v_jd - O_id)^2."""
        weight = by_kv_head(self.problem, weight)
        square, plain = products_of(weight, self._square, self._values)
        total = weight.sum(-1, keepdim=True)
        variance = square - 2 * self._out * plain + self._out_square * total
        return by_head(self.problem, variance.clamp_(min=0.0))
