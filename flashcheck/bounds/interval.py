"""Acceptance intervals: the stored values that the declared arithmetic can produce."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flashcheck.formats import Format, round_nearest

_EVALUATION = 1.0 + 2.0**-26  # the bounds are themselves evaluated in float64: THEORY.md section 2.5


@dataclass(frozen=True, slots=True)
class Interval:
    """Elementwise [lower, upper] around ``exact``; both ends are values of the output format.

    Attributes:
        exact: the oracle's value.
        lower, upper: ends; infinite where the arithmetic may overflow.
        may_overflow: elements whose computation may leave the range of fp32 on the way; for them NaN and
            infinities are accepted too, never another finite number (contract, point 7).
    """

    exact: Tensor
    lower: Tensor
    upper: Tensor
    may_overflow: Tensor

    @property
    def bound(self) -> Tensor:
        """Largest |stored - exact| that is accepted; 0 where only the exact value is."""
        return torch.maximum((self.lower - self.exact).abs(), (self.upper - self.exact).abs()).nan_to_num(
            nan=0.0, posinf=torch.inf
        )

    def margin(self, got: Tensor) -> Tensor:
        """|got - exact| / bound per element, above 1 exactly where ``got`` is rejected.

        A value inside the interval has margin at most 1. NaN or an infinity that is not accepted, and any
        difference where the bound is 0, have margin inf.
        """
        got = got.to(torch.float64)
        same = (got == self.exact) | (~torch.isfinite(got) & self.may_overflow)
        inside = (got >= self.lower) & (got <= self.upper)
        ratio = (got - self.exact).abs() / self.bound
        ratio = torch.where(torch.isinf(self.bound), 0.0, ratio)
        outside = torch.where(torch.isfinite(ratio), ratio.clamp(min=1.0 + 2.0**-20), torch.inf)
        return torch.where(same, 0.0, torch.where(inside, ratio.clamp(max=1.0), outside))


def rounded_interval(
    exact: Tensor, error: Tensor, fmt: Format, may_overflow: Tensor | None = None
) -> Interval:
    """What rounding to nearest into ``fmt`` makes of [exact - error, exact + error].

    Rounding is monotone, so the ends of the interval round to the ends of the accepted set; this is
    tighter than adding half an ulp (THEORY.md section 2.5). ``error`` may be inf.
    """
    error = error * _EVALUATION + 1e-14 * exact.abs()
    unlimited = ~torch.isfinite(error)
    lower = torch.where(unlimited, -torch.inf, round_nearest(exact - error, fmt))
    upper = torch.where(unlimited, torch.inf, round_nearest(exact + error, fmt))
    lower = torch.where(torch.isinf(exact), exact, lower)
    upper = torch.where(torch.isinf(exact), exact, upper)
    overflow = unlimited if may_overflow is None else (unlimited | may_overflow)
    return Interval(exact, lower, upper, overflow)
