"""Upper limits on an operand before it is rounded into its format, and what several terms ask of them."""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from flashcheck.bounds.numbers import UNIT
from flashcheck.formats import Format, binade, is_power_of_two, round_nearest


class Limits:
    """Magnitudes that an operand has at most.

    Attributes:
        plain: float64; scaled: times the ``factor`` with which the operand is rounded.
    """

    def __init__(self, plain: Tensor, factor: float = 1.0) -> None:
        self.plain, self.factor = plain, factor
        self.scaled = plain if factor == 1.0 else plain * factor
        self._binades: dict[int, Tensor] = {}

    @cached_property
    def largest(self) -> float:
        """Of ``scaled``; NaN where one is."""
        return float(self.scaled.amax()) if self.scaled.numel() else 0.0

    def _binade(self, fmt: Format) -> Tensor:
        """2^floor(log2 |x|), or that of the smallest normal number; not to be changed in place."""
        known = self._binades.get(fmt.min_exponent)
        if known is None:
            known = binade(self.scaled).clamp_(min=2.0**fmt.min_exponent, max=2.0**1023)
            self._binades[fmt.min_exponent] = known
        return known

    def half_ulp(self, fmt: Format) -> Tensor:
        """``formats.half_ulp`` of ``scaled``, for formats narrower than fp64."""
        return self._binade(fmt) * 2.0**-fmt.precision

    def rounding(self, fmt: Format) -> Tensor:
        """Error of rounding a value of magnitude at most ``plain`` into ``fmt``; inf past its range."""
        if fmt.precision >= 24:
            return torch.zeros_like(self.plain)
        error = self._binade(fmt) * (2.0**-fmt.precision / self.factor)
        torch.minimum(error, self.plain, out=error)
        if not is_power_of_two(self.factor):
            error.add_(self.plain, alpha=UNIT)
        if self.largest < fmt.overflow_threshold:
            return error
        past = torch.inf if not fmt.saturates else self.plain
        return torch.where(self.scaled >= fmt.overflow_threshold, past, error)

    def with_rounding(self, fmt: Format) -> float | None:
        """Limit on ``plain`` and ``rounding`` together, over all elements; None: the latter may be inf."""
        inside = fmt.precision >= 24 or self.largest < fmt.overflow_threshold
        return 2.001 * self.largest / self.factor if inside or fmt.saturates else None

    def rounded(self, fmt: Format) -> Tensor:
        """``scaled`` rounded to nearest into ``fmt``: ``formats.round_inside`` where the binade is known."""
        if not self.largest < fmt.max_finite:
            return round_nearest(self.scaled, fmt)
        alpha, spacings = 1.5 * 2.0 ** (53 - fmt.precision), self._binade(fmt)
        return torch.add(self.scaled, spacings, alpha=alpha).sub_(spacings, alpha=alpha)
