"""Acceptance intervals: the stored values that the declared arithmetic can produce."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from flashcheck.formats import Format, half_ulp, round_inside, round_nearest

_NEVER = torch.zeros((), dtype=torch.bool)
_EVALUATION = 1.0 + 2.0**-26  # the bounds are themselves evaluated in float64: THEORY.md section 2.5


@dataclass(frozen=True, slots=True)
class Interval:
    """Elementwise [lower, upper] around ``exact``; both ends are values of the output format.

    Attributes:
        exact: the oracle's value.
        error: proved limit on |unrounded result - exact|, before the output is rounded; may be inf.
        lower, upper: ends; infinite where the arithmetic may overflow.
        may_overflow: elements whose computation may leave the range of fp32 on the way; for them NaN and
            infinities are accepted too, never another finite number (contract, point 7).
        fmt: the output format.
        inside: |exact| + ``error`` is known to lie inside the range of ``fmt`` everywhere.
    """

    exact: Tensor
    error: Tensor
    lower: Tensor
    upper: Tensor
    may_overflow: Tensor
    fmt: Format
    inside: bool = False
    _needs: list[tuple[Tensor, int, Tensor, Tensor | None]] = field(
        default_factory=list, init=False, repr=False, compare=False
    )

    @property
    def bound(self) -> Tensor:
        """Largest |stored - exact| that is accepted; 0 where only the exact value is."""
        return torch.maximum((self.lower - self.exact).abs(), (self.upper - self.exact).abs()).nan_to_num(
            nan=0.0, posinf=torch.inf
        )

    def accepts(self, got: Tensor) -> Tensor:
        """True where the declared arithmetic can have stored ``got``."""
        got = got.to(torch.float64)
        same = (got == self.exact) | (~torch.isfinite(got) & self.may_overflow)
        return same | ((got >= self.lower) & (got <= self.upper))

    def bound_at(self, index: tuple[int, ...]) -> float:
        """``bound`` of one element."""
        exact, error, lower, upper = (x[index] for x in (self.exact, self.error, self.lower, self.upper))
        one = Interval(exact, error, lower, upper, _NEVER, self.fmt)
        return float(one.bound)

    def needs(self, got: Tensor) -> tuple[Tensor, Tensor | None]:
        """``got`` in float64, and the least |x - exact| of all x that round to it: 0 or less for a right got.

        The final rounding is exact arithmetic and is not counted against the kernel. None where some number
        is not finite. The last answer is kept: a margin and the choice of the oracle's rung ask for the same.
        """
        version = -1 if got.is_inference() else got._version  # of what may have been changed in place since
        for known, then, wide, need in self._needs:
            if known is got and then == version >= 0:
                return wide, need
        wide = got.to(torch.float64)
        away = (wide - self.exact).abs_()
        need = None
        if math.isfinite(float(away.sum()) + float(self.error.sum())):
            need = away.sub_(_half_cell(wide, self.exact, self.fmt))
        self._needs[:] = [(got, version, wide, need)]
        return wide, need

    def margin(self, got: Tensor) -> Tensor:
        """Share of the proved error that ``got`` needs, per element; above 1 exactly where rejected.

        0 means correctly rounded. NaN or an infinity that is not accepted, and any difference where no error
        is allowed: inf.
        """
        got, need = self.needs(got)
        if need is not None:  # the ordinary case, in fewer steps
            ratio = need.clamp(min=0.0).div_(self.error)
            accepted = (got >= self.lower).logical_and_(got <= self.upper)
            if bool(accepted.all()):
                return ratio.nan_to_num_(0.0, 0.0).clamp_(max=1.0)
            accepted.logical_or_(got == self.exact)
            ratio.nan_to_num_(0.0, torch.inf)
            inside = ratio.masked_fill(ratio == torch.inf, 0.0).clamp_(max=1.0)
            return torch.where(accepted, inside, ratio.clamp_(min=1.0 + 2.0**-20))
        need = (got - self.exact).abs() - _half_cell(got.nan_to_num(0.0), self.exact, self.fmt)
        ratio = need.clamp(min=0.0) / self.error
        ratio = torch.where(torch.isinf(self.error) | (need <= 0), 0.0, ratio)
        outside = torch.where(torch.isfinite(ratio), ratio.clamp(min=1.0 + 2.0**-20), torch.inf)
        inside = torch.where(torch.isfinite(ratio), ratio.clamp(max=1.0), 0.0)
        return torch.where(self.accepts(got), inside, outside)


def _half_cell(got: Tensor, exact: Tensor, fmt: Format) -> Tensor:
    """Distance from ``got`` to the end, on the side of ``exact``, of the numbers that round to it."""
    # |got|, a little less where |exact| is less: below a power of two the spacing is half as wide. Choosing
    # by a condition would take ten times as long.
    size = got.abs()
    toward = torch.minimum(exact.abs(), size)
    return half_ulp(torch.maximum(toward, size.mul_(1 - 2.0**-40), out=toward), fmt)


def apart(joined: Interval, shapes: Sequence[torch.Size]) -> list[Interval]:
    """An interval of one dimension as intervals of these shapes, in order."""
    exact, error, lower, upper, over = (
        pieces(x, shapes)
        for x in (joined.exact, joined.error, joined.lower, joined.upper, joined.may_overflow)
    )
    parts = zip(exact, error, lower, upper, over, strict=True)
    return [Interval(x, e, low, high, past, joined.fmt, joined.inside) for x, e, low, high, past in parts]


def pieces(joined: Tensor, shapes: Sequence[torch.Size]) -> list[Tensor]:
    """A tensor of one dimension cut into tensors of these shapes, in order."""
    parts = joined.split_with_sizes([shape.numel() for shape in shapes])
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


def rounded_interval(
    exact: Tensor, error: Tensor, fmt: Format, may_overflow: Tensor | None = None
) -> Interval:
    """What rounding to nearest into ``fmt`` makes of [exact - error, exact + error].

    Rounding is monotone, so the ends of the interval round to the ends of the accepted set; this is
    tighter than adding half an ulp (THEORY.md section 2.5). ``error`` may be inf.
    """
    if may_overflow is None:
        may_overflow = torch.zeros((), dtype=torch.bool, device=exact.device).expand_as(exact)
    inside = _ends_inside(exact, error.expand_as(exact), fmt)
    if inside is not None:  # the ordinary case, in fewer steps
        whole, lower, upper = inside
        return Interval(exact, whole, lower, upper, may_overflow.expand_as(exact), fmt, inside=True)
    error, size = error * _EVALUATION, exact.abs()
    error = error + 1e-14 * size.nan_to_num(0.0, 0.0)
    unlimited = ~torch.isfinite(error)
    lower = torch.where(unlimited, -torch.inf, round_nearest(exact - error, fmt))
    upper = torch.where(unlimited, torch.inf, round_nearest(exact + error, fmt))
    lower = torch.where(torch.isinf(exact), exact, lower)
    upper = torch.where(torch.isinf(exact), exact, upper)
    return Interval(exact, error, lower, upper, unlimited | may_overflow, fmt)


def _ends_inside(exact: Tensor, error: Tensor, fmt: Format) -> tuple[Tensor, Tensor, Tensor] | None:
    """(error, lower, upper) of an interval that lies inside the range of ``fmt``; None where one does not."""
    size = exact.abs()
    whole = (size * 1e-14).add_(error, alpha=_EVALUATION)
    if size.numel() and not float(size.add_(whole).amax()) < fmt.max_finite:
        return None
    lower, upper = exact - whole, exact + whole
    return whole, round_inside(lower, fmt, out=lower), round_inside(upper, fmt, out=upper)
