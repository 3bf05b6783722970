"""Centred bounds (tier C): the roundings of P and dS are predicted, not bounded. THEORY.md section 6.

The reference says which value of the narrow format each probability rounds to, except where it lies so
close to a rounding boundary that the fp32 errors decide. What is left uncertain is of fp32 size, so the
interval often holds a single 16-bit number. A value inside the worst-case bound (tier A) and outside
this one was not computed by the algorithm that was declared.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from flashcheck.arithmetic import Arithmetic, Machine
from flashcheck.bounds.alignment import subnormal_values
from flashcheck.bounds.gradient_sums import GradientSum
from flashcheck.bounds.interval import Interval, rounded_interval
from flashcheck.bounds.limits import Limits
from flashcheck.bounds.numbers import UNIT, expm1_clipped, flushed
from flashcheck.bounds.pairs import PairErrors
from flashcheck.bounds.products import weighted
from flashcheck.bounds.tiling import SMALLEST_TILE
from flashcheck.bounds.weights import WeightErrors
from flashcheck.formats import Format, is_power_of_two, round_inside, round_nearest

_LIMIT = 50.0  # e^50 is "anything" here
_NO_WEIGHT = 1e-300  # below, P is stored as 0, and 1 / P may be infinite


def forward_applies(arithmetic: Arithmetic) -> bool:
    """The forward's roundings can be predicted: tiling declared, P rounded before it is normalised."""
    return (
        arithmetic.tiling_known
        and arithmetic.normalise == "after_product"
        and arithmetic.row_sum == "unrounded"
        and arithmetic.rescale_threshold == 0
        and arithmetic.splits == 1
        and is_power_of_two(arithmetic.probability_scale)
    )


def forward_interval(
    weights: WeightErrors, arithmetic: Arithmetic, machine: Machine, overflow: Tensor
) -> Interval:
    """Centred interval for out (B, H, Nq, dv): terms [C1] to [C3]."""
    rows, tiling = weights.rows, weights.tiling
    fmt, factor = arithmetic.probability_format, arithmetic.probability_scale
    running, num_keys = tiling.running_max, rows.num_keys
    assert running is not None
    weight, stored = weights.in_tiles, weights.stored_in_tiles
    if weights.moved_sum is not None:
        more = less = weights.moved_sum * (1 + weights.worst) + weights.shift
        more = more + more.square()
    else:
        kernel = (weights.relative + weights.shift).clamp(max=_LIMIT)
        more = (rows.p * torch.expm1(kernel)).sum(-1, keepdim=True)
        less = -(rows.p * torch.expm1(-kernel)).sum(-1, keepdim=True)
    ambiguous = _ambiguous(weights, fmt, factor)  # [C1]
    # [C2] The factors that carry a tile's weights to shares of the row, and their errors.
    share = weights.carried
    chain = weights.chain + 2 * weights.own_max
    if arithmetic.scale_placement == "exponent_fma":
        chain = chain + UNIT * (running.abs() + rows.row_max.abs() + 2 * (weights.own_max + arithmetic.lift))
    if not (arithmetic.lift and rows.has_sink):  # [W7] the sink may take over from a lifted maximum
        chain = torch.where(running < rows.row_max, chain, 0.0)
    chain = (chain + weights.exp_error * weights.rescales).clamp(max=_LIMIT)
    numerator = stored * share
    moved = tiling.per_key(expm1_clipped(chain))
    slack = torch.addcmul(ambiguous, ambiguous, moved).mul_(share).addcmul_(numerator, moved)
    if weights.flush:
        slack.addcmul_(stored, weights.flush / rows.row_sum)
    if weights.exponential.flush:  # a weight under the limit may be 0
        slack.addcmul_(weight.clamp(max=weights.exponential.flush), share)
    sums = machine.vector.gamma(num_keys) + weights.rescales * UNIT
    least = ((1 - less) * (1 - min(sums, 0.5))).clamp(min=1e-300)
    quotient = torch.maximum(
        (1 + machine.division_error) / least - 1,
        1 - (1 - machine.division_error) / ((1 + more) * (1 + sums)),
    )  # [C3]
    unit = machine.accumulator(arithmetic.product_format or fmt)
    gamma = unit.gamma(num_keys, arithmetic.block_keys or SMALLEST_TILE) + weights.rescales * UNIT
    centre = weighted(rows.problem, numerator, rows.values)
    shares = numerator + slack if unit.alignment or unit.flush_subnormals else numerator
    charged = slack.mul_(1 + gamma).add_(numerator, alpha=gamma)
    error = weighted(rows.problem, charged, rows.sizes)
    scaled = weights.scaled
    error = error + unit.floor(num_keys) / scaled
    if lost := flushed(machine):  # [O6]
        error = error + (2 * weights.rescales + 1) * lost / scaled + 2 * lost
    steps = -(-num_keys // unit.block) + weights.rescales
    error = error + subnormal_values(rows, shares, scaled, unit, steps, arithmetic)
    error = error * (1 + quotient) + quotient * centre.abs()
    error = error.nan_to_num_(torch.inf, torch.inf)
    if not rows.all_live:
        error, centre = torch.where(rows.live, error, torch.inf), torch.where(rows.live, centre, 0.0)
    return rounded_interval(centre, error, arithmetic.output_format, overflow)


def _ambiguous(weights: WeightErrors, fmt: Format, factor: float) -> Tensor:
    """[C1] How far apart the numbers lie that a weight in its tile can round to."""
    weight, local = weights.in_tiles, weights.local
    if not weights.linear:
        moved = weight * torch.expm1(local.clamp(max=_LIMIT))
        limits = Limits(weight + moved, factor)
        value, width = (weight, moved) if factor == 1.0 else (weight * factor, moved * factor)
        slack = _width(value, width, limits, fmt)
    elif fmt.precision >= 24:
        return (weight * local).mul_(2 * (1 + weights.worst))
    else:
        limits = weights.most_in_tiles
        least = torch.addcmul(weight, weight, local, value=-(1 + weights.worst))
        least = least if factor == 1.0 else least.mul_(factor)
        nearest = round_inside if limits.largest < fmt.max_finite else round_nearest
        slack = limits.rounded(fmt).sub_(nearest(least, fmt))
    return slack if factor == 1.0 else slack.div_(factor)


@dataclass(frozen=True, slots=True)
class PredictedPairs:
    """What P and dS round to, and the widths of what they can round to: term [C1]; (B, H, Nq, Nk)."""

    p: Tensor
    p_slack: Tensor
    ds: Tensor
    ds_size: Tensor
    ds_slack: Tensor

    @property
    def magnitudes(self) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
        """Magnitude and slack of dS, and of P."""
        return (self.ds_size, self.ds_slack), (self.p, self.p_slack)


def predicted_pairs(pairs: PairErrors, arithmetic: Arithmetic, scale: float) -> PredictedPairs:
    """The stored operands of a backward's products, dS in units without the ``scale``."""
    p_format = arithmetic.probability_format
    ds_format = arithmetic.grad_score_format or p_format
    p, p_error, factor = pairs.p, pairs.p_error, arithmetic.probability_scale
    if factor != 1.0:
        p, p_error = p * factor, p_error * factor
    p, p_slack = _predicted(p, p, p_error, pairs.p_limits, p_format)
    if factor != 1.0:
        p.div_(factor)
        p_slack.div_(factor)
    ds, ds_size, ds_error, limits = pairs.ds, pairs.ds_size, pairs.ds_error, pairs.ds_limits
    if arithmetic.grad_score_probability == "rounded":
        ds, ds_error = _of_rounded_p(pairs, p, p_slack)
        ds_size = ds.abs()
        limits = Limits(ds_size + ds_error)
    ds, ds_slack = _predicted(ds, ds_size, ds_error, limits, ds_format)
    if arithmetic.scaled_grad_score_format is not None and scale:
        # What the first rounding leaves, the scale's own rounding and that of the product in fp32.
        error = (ds_slack + 2 * UNIT * (ds.abs() + ds_slack)) * abs(scale)
        ds = ds * scale
        ds_size = ds.abs()
        limits = Limits(ds_size + error)
        ds, ds_slack = _predicted(ds, ds_size, error, limits, arithmetic.scaled_grad_score_format)
        ds, ds_slack = ds / scale, ds_slack / abs(scale)
    return PredictedPairs(p, p_slack, ds, ds.abs(), ds_slack)


def _of_rounded_p(pairs: PairErrors, p: Tensor, p_slack: Tensor) -> tuple[Tensor, Tensor]:
    """dS of the P that is stored, and how far the computed one lies from it: dS / P times the stored P."""
    share = torch.where(pairs.p > _NO_WEIGHT, 1 / pairs.p, 0.0)
    error = pairs.ds_given_p * (share * (p + p_slack)).clamp_(min=1.0)
    return pairs.ds * (share * p), error + pairs.ds.abs() * (share * p_slack)


def gradient_centre(total: GradientSum, stored: PredictedPairs) -> Tensor:
    """dq, dk or dv of the stored operands; no tiling is needed, since P is recomputed from the stored LSE."""
    operand = stored.p if total.name == "dv" else stored.ds
    return total.apply(operand, total.other).mul_(total.factor)


def gradient_interval(
    centre: Tensor, error: Tensor, exact: Tensor, fmt: Format, overflow: Tensor | None
) -> Interval:
    """Centred interval; all of one shape.

    Gradients whose ``exact`` value is not finite (a stored LSE too coarse for its scores) are unlimited.
    """
    if not math.isfinite(float((exact + centre).sum() + error.sum())):
        defined = torch.isfinite(exact) & torch.isfinite(centre)
        error = torch.where(defined, error.nan_to_num(torch.inf, torch.inf), torch.inf)
        centre = torch.where(defined, centre, 0.0)
    return rounded_interval(centre, error, fmt, overflow)


def _predicted(x: Tensor, size: Tensor, error: Tensor, limits: Limits, fmt: Format) -> tuple[Tensor, Tensor]:
    """What x rounds to, and the width of what x +- error can round to: term [C1].

    Args:
        size: |x|; limits: |x| + error. Rounding to nearest is odd, so magnitudes serve.
    """
    nearest = round_inside if limits.largest < fmt.max_finite else round_nearest
    return nearest(x, fmt), _width(size, error, limits, fmt)


def _width(size: Tensor, error: Tensor, limits: Limits, fmt: Format) -> Tensor:
    if fmt.precision >= 24:
        return 2 * error
    nearest = round_inside if limits.largest < fmt.max_finite else round_nearest
    return limits.rounded(fmt).sub_(nearest(size - error, fmt))
