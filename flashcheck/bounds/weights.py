"""How far the computed softmax weights can be from the exact ones: THEORY.md sections 3.2 to 3.5."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from flashcheck.arithmetic import Arithmetic, Machine
from flashcheck.bounds.exponential import Exponential, exponential_of
from flashcheck.bounds.limits import Limits
from flashcheck.bounds.numbers import (
    LARGEST_LINEAR,
    UNIT,
    exp_clipped,
    flushed,
    weighted_growth,
)
from flashcheck.bounds.rows import SoftmaxRows
from flashcheck.bounds.scores import ScoreError
from flashcheck.bounds.tiling import Tiling, tiling_of
from flashcheck.formats import half_ulp, is_power_of_two, round_inside, round_nearest


@dataclass(frozen=True)
class WeightErrors:
    """Errors of the softmax weights; logarithms of factors. n keys; T tiles, or 1.

    Attributes:
        rows: the rows they belong to; arithmetic: what made the weights.
        own_max: (B, H, Nq, 1) largest score error of the row: limits the error of every running maximum.
        relative: (B, H, Nq, n) |delta| of each weight up to a factor common to the row.
        moved: (B, H, Nq, n) p * relative where ``linear``, else None; moved_sum: (B, H, Nq, 1) its sum.
        shift: (B, H, Nq, 1) that common factor: in the kernel's own units exp(s - m) weights err by
            relative + shift.
        local: (B, H, Nq, n) error of the weight as it is rounded, before rescaling.
        chain: error added by rescaling alone, (B, H, Nq, T) or, for an undeclared tiling, per key.
        tiling: the maxima that weights were taken against.
        rescales: number of rescalings; exponential: limits of one exponential; flush: of a weight's
            product of exponentials.
        worst: the largest relative or local error of all.
        linear: ``worst`` is below LARGEST_LINEAR, so that exp(x) - 1 <= x (1 + worst) is as good.
        spread: (B, H, Nq, 1) lower limit of sum p exp(-relative).
        denominator: (B, H, Nq, 1) lower limit of the computed row sum, in kernel units.
        overflow: (B, H, Nq, 1) rows in which an exponential may overflow.
    """

    rows: SoftmaxRows
    arithmetic: Arithmetic
    own_max: Tensor
    relative: Tensor
    moved: Tensor | None
    moved_sum: Tensor | None
    shift: Tensor
    local: Tensor
    chain: Tensor
    tiling: Tiling
    rescales: int
    exponential: Exponential
    flush: float
    worst: float
    spread: Tensor
    denominator: Tensor
    overflow: Tensor

    @property
    def exp_error(self) -> float:
        """ln of 1 + the error of one exponential."""
        return self.exponential.log_error

    @property
    def linear(self) -> bool:
        return self.worst <= LARGEST_LINEAR

    @cached_property
    def in_tiles(self) -> Tensor:
        """exp(s - m_t), (B, H, Nq, n), 0 where hidden: the weights that a declared tiling rounds."""
        rows, tiling = self.rows, self.tiling
        assert tiling.running_max is not None
        lift = rows.row_max - tiling.running_max
        if float(lift.amax() if lift.numel() else 0.0) < 30.0:
            return tiling.with_keys(torch.mul, rows.p, torch.exp(lift) * rows.row_sum)
        return rows.hide(torch.exp(tiling.per_key(lift) - rows.gap))

    @cached_property
    def most_in_tiles(self) -> Limits:
        """What ``in_tiles`` may be computed as at most; where ``linear``."""
        most = torch.addcmul(self.in_tiles, self.in_tiles, self.local, value=1 + self.worst)
        return Limits(most, self.arithmetic.probability_scale)

    @cached_property
    def stored_in_tiles(self) -> Tensor:
        """``in_tiles`` as P's format stores it; not to be changed in place."""
        factor, fmt = self.arithmetic.probability_scale, self.arithmetic.probability_format
        value = self.in_tiles if factor == 1.0 else self.in_tiles * factor
        inside = 1.001 * factor < fmt.max_finite  # no weight passes 1 by more than float64's roundings
        stored = round_inside(value, fmt) if inside else round_nearest(value, fmt)
        return stored if factor == 1.0 else stored.div_(factor)

    @cached_property
    def carried(self) -> Tensor:
        """What carries a tile's weights to shares of the row, (B, H, Nq, n) or (B, H, Nq, 1)."""
        rows, running = self.rows, self.tiling.running_max
        assert running is not None
        return self.tiling.per_key(torch.exp(running - rows.row_max) / rows.row_sum)

    @property
    def scaled(self) -> Tensor:
        """Lower limit of the divisor of the unnormalised sums, in their own units (B, H, Nq, 1)."""
        arithmetic = self.arithmetic
        if arithmetic.normalise == "before_product":
            return torch.full_like(self.denominator, arithmetic.probability_scale)
        # [W7] A sink may be the last reference, and is not lifted.
        taken_over = arithmetic.lifted if self.rows.has_sink else 1.0
        return self.denominator * (arithmetic.probability_scale / taken_over)

    def growth(self, error: Tensor | None = None) -> Tensor:
        """At least p (exp(error) - 1), (B, H, Nq, n); the relative errors by default."""
        if error is None and self.moved is not None:
            return self.moved * (1 + self.worst)
        return weighted_growth(self.rows.log_p, self.relative if error is None else error)


def weight_errors(
    rows: SoftmaxRows, errors: ScoreError, arithmetic: Arithmetic, machine: Machine
) -> WeightErrors:
    """Terms [W1] to [W7] of THEORY.md section 3.2 to 3.4."""
    own, gap = rows.own, rows.gap
    own_max = own.amax(-1, keepdim=True) if rows.num_keys else torch.zeros_like(rows.row_max)
    lift = arithmetic.lift  # [W7]
    size = rows.row_max.abs() + own_max + lift
    exponential = exponential_of(arithmetic, machine)
    exp_error = exponential.log_error
    constant = 0.0 if errors.additive else errors.constant
    roundings = 2 if arithmetic.scale_placement == "exponent_subtract_first" else 1
    # Score errors, [W1] the constant and [W2] the argument: u (gap + own + own_max) and constant * gap.
    base = (own * (1 + roundings * UNIT)).add_(gap, alpha=constant + roundings * UNIT)
    common = roundings * UNIT * (own_max + lift)
    tiling = tiling_of(rows, arithmetic)
    running, rescales = tiling.running_max, tiling.rescales
    fma = arithmetic.scale_placement == "exponent_fma"
    if running is None:  # any tiling: m - m_t <= m - s and |m_t| <= max(|s|, |m|)
        behind = gap
        reference = torch.maximum((rows.row_max - gap).abs(), rows.row_max.abs())
    else:
        behind, reference = rows.row_max - running, running.abs()
    reference = reference + lift
    chain, mismatch = torch.zeros_like(own_max), torch.zeros_like(own_max)
    if rescales:  # [W3], [W4]
        stale = arithmetic.rescale_threshold * math.log(2.0)
        chain = 2 * UNIT * (behind + 2 * own_max + stale + lift)
        if fma:
            mismatch = UNIT * (reference + own_max + size)
    steps = common + chain + mismatch + exp_error * (1 + rescales)  # [W5]
    relative = tiling.with_keys(torch.add, base, steps)
    local = common + own_max + exp_error + (UNIT * (reference + own_max) if fma else 0.0)
    if not is_power_of_two(arithmetic.probability_scale):
        local = local + UNIT
    local = tiling.with_keys(Tensor.add_, base, local)
    worst = max(float(relative.amax()), float(local.amax())) if relative.numel() else 0.0
    worst = worst if worst >= 0 else math.inf  # NaN is not small
    shift = own_max + UNIT * size
    moved = moved_sum = None
    if worst <= LARGEST_LINEAR:
        moved = rows.p * relative
        moved_sum = moved.sum(-1, keepdim=True)
        spread = 1 - moved_sum
        total = (spread - shift).clamp(min=0.0)
    else:
        relative, local = rows.hide(relative), rows.hide(local)
        spread = torch.exp(rows.log_p - relative).sum(-1, keepdim=True)
        total = torch.exp(rows.log_p - relative - shift).sum(-1, keepdim=True)
    # [W6] The key that the kernel takes for the maximum weighs exp2(rho), |rho| <= 2 u |m|.
    least = torch.exp(-(2 * UNIT * size + exp_error).clamp(max=700.0))
    return WeightErrors(
        rows=rows,
        arithmetic=arithmetic,
        own_max=own_max,
        relative=relative,
        moved=moved,
        moved_sum=moved_sum,
        shift=shift,
        local=local,
        chain=chain,
        tiling=tiling,
        rescales=rescales,
        exponential=exponential,
        flush=(1 + rescales) * exponential.flush * (arithmetic.lifted if rows.has_sink else 1.0)
        + (flushed(machine) if arithmetic.normalise == "before_product" else 0.0),
        worst=worst,
        spread=spread,
        denominator=torch.maximum(total * rows.row_sum, least),
        overflow=_may_overflow(rows, reference, own_max, size, arithmetic) & fma,
    )


def _may_overflow(
    rows: SoftmaxRows, reference: Tensor, own_max: Tensor, size: Tensor, arithmetic: Arithmetic
) -> Tensor:
    """Rows whose common factor 2^rho, |rho| <= u|m| log2(e), may leave the range of P (of fp32 at most):
    [W6], for any running maximum, not only the last one."""
    limit = min(80.0, -arithmetic.probability_format.min_exponent * math.log(2.0))
    if not reference.shape[-1]:
        return 4 * UNIT * size > limit
    if reference.shape == rows.gap.shape:
        reference = rows.hide(reference)
    return 4 * UNIT * (reference.amax(-1, keepdim=True) + own_max).maximum(size) > limit


@dataclass(frozen=True, slots=True)
class ProbabilityRounding:
    """Upper limits on the computed weights p~ and on the error of rounding them, as shares of the row;
    ``error`` is None where P is not rounded."""

    largest: Tensor
    error: Tensor | None


def probability_rounding(weights: WeightErrors, arithmetic: Arithmetic) -> ProbabilityRounding:
    """Term [P1] of THEORY.md section 3.5; also the limits p~ <= exp(D) p / sum p exp(-D)."""
    largest = _largest_shares(weights)
    fmt, factor = arithmetic.probability_format, arithmetic.probability_scale
    if fmt.precision >= 24:
        return ProbabilityRounding(largest, None)
    floor = fmt.quantum / (2 * factor)
    if arithmetic.normalise == "before_product":
        error = torch.minimum((largest * fmt.unit_roundoff).clamp_(min=floor), largest)
        return ProbabilityRounding(largest, error)
    stale = 2.0**arithmetic.rescale_threshold
    if weights.tiling.running_max is not None and arithmetic.rescale_threshold == 0:
        error = _rounding_in_tiles(weights, arithmetic)
    else:
        error = torch.maximum(largest * fmt.unit_roundoff, floor / weights.denominator)
    error = torch.minimum(error, largest)
    most = float(weights.local.amax()) if weights.linear and weights.local.numel() else 0.0
    if not weights.linear or factor * stale * math.exp(most) >= fmt.overflow_threshold:
        saturates = factor * stale * exp_clipped(weights.local) >= fmt.overflow_threshold
        error = torch.where(saturates, largest, error)
    if not is_power_of_two(factor):
        error.add_(largest, alpha=UNIT)
    return ProbabilityRounding(largest, error)


def _largest_shares(weights: WeightErrors) -> Tensor:
    """p~ <= min(1, p exp(D) / sum p exp(-D)), or the same relative to the largest key."""
    rows = weights.rows
    if weights.linear:
        return (rows.p * ((1 + 1.02 * weights.worst) / weights.spread)).clamp_(max=1.0)
    log_p = rows.log_p
    largest = (exp_clipped(log_p + weights.relative) / weights.spread).nan_to_num(1.0, 1.0).clamp(max=1.0)
    centred = centred_errors(weights)
    spread = torch.exp(log_p - centred).sum(-1, keepdim=True)
    alternative = (exp_clipped(log_p + centred) / spread).nan_to_num(1.0, 1.0)
    return rows.hide(torch.minimum(largest, alternative))


def _rounding_in_tiles(weights: WeightErrors, arithmetic: Arithmetic) -> Tensor:
    """half_ulp(c exp(s - m_t + local)) / c, carried to the final maximum, as a share of the row."""
    rows, tiling = weights.rows, weights.tiling
    assert tiling.running_max is not None
    fmt, factor = arithmetic.probability_format, arithmetic.probability_scale
    behind = tiling.running_max - rows.row_max
    steps = weights.exp_error * weights.rescales
    if weights.linear:
        half = weights.most_in_tiles.half_ulp(fmt)
    else:
        half = half_ulp(factor * exp_clipped(tiling.per_key(-behind) - rows.gap + weights.local), fmt)
    carried = exp_clipped(behind + weights.chain + (2 * weights.own_max + steps))
    return tiling.with_keys(Tensor.mul_, half, carried / (factor * weights.denominator))


def centred_errors(weights: WeightErrors) -> Tensor:
    """Errors relative to the largest key's: D_j + D_top, and 0 for that key (THEORY.md 3.4)."""
    rows = weights.rows
    if not rows.num_keys:
        return weights.relative
    gap = rows.gap if rows.mask is None else torch.where(rows.mask > 0, rows.gap, torch.inf)
    top = gap.argmin(-1, keepdim=True)
    centred = weights.relative + weights.relative.gather(-1, top)
    return centred.scatter(-1, top, 0.0)
