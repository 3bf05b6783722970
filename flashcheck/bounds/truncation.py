"""Dot products in units that align addends and cut off what lies below: their variance and their bias.

A block unit keeps 2^-F of the binade of the largest addend of a step, the sum so far or a product, and cuts
the rest of each product off, toward zero. Products of one sign so lose, all in one direction, what a random
walk would hide. THEORY.md section 5.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from flashcheck.arithmetic import Accumulator
from flashcheck.bounds.accumulation import (
    LARGEST_PRODUCT,
    accumulation_bias,
    storing_weights,
)
from flashcheck.bounds.products import weighted
from flashcheck.formats import binade
from flashcheck.problem import Problem


@dataclass(frozen=True, slots=True)
class _Lost:
    """Toward zero on average, by a product and by the sum itself (with its sign); and the variance of all."""

    of_product: Tensor
    of_sum: Tensor
    variance: Tensor


@dataclass(frozen=True)
class DotProducts:
    """left @ right in one unit, pair by pair.

    Attributes:
        left: (B, H, Nq, d), right: (B, Hkv, d, Nk), float64.
        total: (B, H, Nq, Nk) the products.
    """

    problem: Problem
    unit: Accumulator
    left: Tensor
    right: Tensor
    total: Tensor

    @cached_property
    def squares(self) -> Tensor:
        """Shape of ``total``: the sums of the squares of their terms."""
        return weighted(self.problem, self.left.square(), self.right.square())

    @property
    def terms(self) -> int:
        return self.left.shape[-1]

    @property
    def steps(self) -> int:
        return -(-self.terms // self.unit.block)

    def variance(self) -> Tensor:
        """Of each sum, shape of ``total``."""
        if self._aligns:
            return self._lost.variance.clone()
        ends, bridge = storing_weights(self.unit, self.steps)
        squares = weighted(self.problem, self.left.square().mul_(bridge), self.right.square())
        return squares.addcmul_(self.total, self.total, value=ends)

    def bias(self) -> Tensor | None:
        """Mean error of each sum; None where sums are rounded to nearest."""
        if self.unit.rounding == "nearest":
            return None
        if not self._aligns:
            return accumulation_bias(self.unit, self.terms, self.total)
        signs = weighted(self.problem, self.left.sign(), self.right.sign())
        return signs.mul_(self._lost.of_product).add_(self._lost.of_sum).neg_()

    @property
    def _aligns(self) -> bool:
        cuts = self.unit.fraction_bits is not None and self.unit.rounding == "toward_zero"
        return cuts and self.terms > 0

    @cached_property
    def _lost(self) -> _Lost:
        """Step by step, from where a sum stands when k of all n products are in it."""
        assert self.unit.fraction_bits is not None
        of_product, of_sum, variance = (torch.zeros_like(self.total) for _ in range(3))
        sign, size, steps = self.total.sign(), self.total.abs(), self.steps
        before = leaning = torch.zeros_like(self.total)
        for step in range(steps):
            # The largest addend is the sum so far or a product: what lies below its last bit is cut off.
            kept = binade(self._partial(step / steps, LARGEST_PRODUCT / self.terms))
            kept.mul_(2.0**-self.unit.fraction_bits)
            share = self._share_below(kept)
            of_product.addcmul_(kept, share, value=0.5 / steps)
            variance.addcmul_(kept.square(), share, value=self.terms / steps / 12)
            # So does the old sum where a product is larger, and the new one where its last bit lies higher.
            done = (step + 1) / steps
            partial = self._partial(done, 0.0)
            after = binade(partial).mul_(2.0 ** (1 - self.unit.precision))
            old, leaned = (kept - before).clamp_(min=0.0), leaning
            before, leaning = after, (size * done).div_(partial.clamp_(min=1e-300)).clamp_(max=1.0)
            new = (after - kept).clamp_(min=0.0)
            for lost, lean in ((new, leaning), (old, leaned))[: 2 if step else 1]:
                of_sum.addcmul_(lost, lean, value=0.5)
                variance.addcmul_(lost.square_(), 1 / 3 - lean.square() / 4)
        parts = (of_product, of_sum.mul_(sign), variance)
        return _Lost(*(x.nan_to_num_(0.0, 0.0) for x in parts))

    def _partial(self, done: float, of_squares: float) -> Tensor:
        """Root mean square of the sum of this share of the products, plus ``of_squares`` of their squares."""
        square = self.squares * (done * (1 - done) + of_squares)
        return square.addcmul_(self.total, self.total, value=done**2).sqrt_()

    def _share_below(self, kept: Tensor) -> Tensor:
        """Share of the products that have bits below ``kept``. A product's lowest bit is that of its factors,
        multiplied: its logarithm is taken as normal, with the mean and the variance of theirs."""
        mean, variance = _lowest_bit(self.left, -1)
        other_mean, other_variance = _lowest_bit(self.right, -2)
        if self.problem.group != 1:
            other_mean, other_variance = (
                x.repeat_interleave(self.problem.group, 1) for x in (other_mean, other_variance)
            )
        # A quarter: the width of a bin, so that equal bits are told from kept, and not divided by 0.
        deviation = (variance + other_variance + 0.25).sqrt()
        distance = kept.clamp(min=1e-300).log2() - (mean + other_mean)
        share: Tensor = torch.special.ndtr(distance / deviation)
        return share


def _lowest_bit(x: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Mean and variance along ``dim`` of the base 2 logarithm of each number's lowest bit that is set; zeros
    do not count."""
    bits = x.contiguous().view(torch.int64)
    significand = (bits & ((1 << 52) - 1)) | (1 << 52)
    exponent = ((bits >> 52) & 0x7FF) - 1075
    lowest = (significand & -significand).double().log2() + exponent
    counts = (x != 0) & torch.isfinite(x)
    number = counts.sum(dim, keepdim=True).clamp(min=1)
    lowest = torch.where(counts, lowest, 0.0)
    mean = lowest.sum(dim, keepdim=True) / number
    variance = torch.where(counts, (lowest - mean).square(), 0.0).sum(dim, keepdim=True) / number
    return mean, variance
