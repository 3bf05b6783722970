"""Predicted rms error per element of the forward pass: THEORY.md section 5."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from flashcheck.arithmetic import Arithmetic, Machine
from flashcheck.bounds.accumulation import (
    ROUNDING_RMS,
    accumulation_bias,
    accumulation_weights,
)
from flashcheck.bounds.numbers import LARGEST_LINEAR, UNIT
from flashcheck.bounds.products import weighted
from flashcheck.bounds.rows import SoftmaxRows
from flashcheck.bounds.score_noise import ScoreNoise
from flashcheck.bounds.weights import WeightErrors
from flashcheck.formats import Format, half_ulp, round_nearest, round_to_spacing, ulp
from flashcheck.problem import Problem

_FINE = 0.2**2
"""(sigma / spacing)^2 below which the output's rounding is summed value by value."""
_LOUD = 1.0
"""(sigma / spacing)^2 past which the sawtooth's waves, 3e-9 there, are 0."""


def first_order(weights: WeightErrors) -> Tensor:
    """(B, H, Nq, 1): rows in which every weight that matters has a small error."""
    rows = weights.rows
    if weights.linear or not rows.num_keys:
        return torch.full_like(rows.live, bool(rows.num_keys))
    # A sink has no value: where it takes nearly all the weight, O is made of the small rest.
    keys = rows.p[..., :-1] if rows.has_sink and rows.num_keys > 1 else rows.p
    least = 1e-12 * keys.amax(-1, keepdim=True)
    worst = torch.where(rows.p > least, weights.relative, 0.0).amax(-1, keepdim=True)
    return worst < LARGEST_LINEAR


def forward_variance(
    problem: Problem,
    noise: ScoreNoise,
    weights: WeightErrors,
    arithmetic: Arithmetic,
    machine: Machine,
) -> tuple[Tensor, Tensor]:
    """Variances of out (B, H, Nq, dv) and lse (B, H, Nq, 1) before they are rounded."""
    rows = weights.rows
    out, p, num_keys = rows.out, rows.p, rows.num_keys
    if num_keys == 0:
        return torch.zeros_like(out), torch.zeros_like(rows.lse)
    deviations = rows.deviations
    argument = rows.gap - arithmetic.lift if arithmetic.lift else rows.gap
    scores = torch.addcmul(_with_sink(noise.variance, rows), argument, argument, value=0.36 * UNIT**2)
    scores.add_((weights.exp_error / 1.73) ** 2)
    p_square = p.square()
    scores.mul_(p_square)
    shift, rounding = _probability_rounding(weights, arithmetic)
    rounded_sum = arithmetic.row_sum == "rounded"
    unit = machine.accumulator(arithmetic.product_format or arithmetic.probability_format)
    ends, bridge = accumulation_weights(unit, num_keys)
    effect, absolute = scores, p_square.mul_(bridge)
    if rounding is not None and rounded_sum:
        effect = scores + rounding
    elif rounding is not None:
        absolute.add_(rounding)
    variance = deviations.variance(effect)
    variance.add_(weighted(problem, absolute, rows.values.square()))
    variance.addcmul_(out, out, value=ends + (0.6 * machine.division_error) ** 2)
    if unit.rounding != "nearest":
        variance.add_(accumulation_bias(unit, num_keys, out).square())
    # The row sum is 1 in shares of the row, and so is the sum of squares at most.
    total = scores.sum(-1, keepdim=True) + sum(accumulation_weights(machine.vector, num_keys))
    if rounding is not None and rounded_sum:
        total = total + rounding.sum(-1, keepdim=True)
    if shift is not None:
        moved = weighted(problem, shift, rows.values)
        if rounded_sum:
            moved_sum = shift.sum(-1, keepdim=True)
            moved, total = moved - out * moved_sum, total + moved_sum.square()
        variance.add_(moved.square_())
    if noise.bias is not None:
        drift = p * _with_sink(noise.bias, rows)
        drift_total = drift.sum(-1, keepdim=True)
        total = total + drift_total.square()
        variance.add_((weighted(problem, drift, rows.values) - out * drift_total).square())
    total = total + 3 * (ROUNDING_RMS * UNIT * (rows.row_max.abs() + arithmetic.lift)).square()
    log_sum = torch.log(rows.row_sum).abs() + arithmetic.lift
    logarithm = (machine.log_relative * log_sum).clamp(min=machine.log_absolute) / 1.73
    total = total + torch.where(log_sum == 0, 0.0, logarithm).square()
    return variance, total


def after_rounding(exact: Tensor, variance: Tensor, fmt: Format) -> Tensor:
    """sqrt(E[(RN(exact + sigma Z) - exact)^2]), Z standard normal, sigma^2 = ``variance``; all of one shape.

    With r = sigma / spacing and o the distance to the nearest stored value, the error of rounding is a
    sawtooth, so that this is, in squared spacings,
    r^2 + 1/12 + sum_k (-1)^k cos(2 pi k o) exp(-2 pi^2 k^2 r^2) (1/(pi k)^2 + 4 r^2).
    Four terms serve where r >= 0.2; below, the masses that round to the values next to the nearest one do, to
    2e-6 (an exactly representable value then has error 0). Where the variance is infinite, so is the result:
    it predicts nothing.
    """
    if not exact.numel():
        return torch.zeros_like(exact)
    spacing = ulp(exact, fmt)
    offset = exact / spacing
    # What follows the division by the spacing is of the order of 1: fp32 keeps seven digits of it.
    offset = offset.round().sub_(offset).float()
    spacing.square_()
    noise = (variance / spacing).nan_to_num_(torch.inf, torch.inf)
    least, most = (float(x) for x in noise.aminmax())
    error = noise + 1 / 12 if least >= _LOUD else _of_rounding(offset, noise, least, most)
    if most > 1e300:
        error = error.masked_fill(noise > 1e300, torch.inf)
    if float(exact.abs().amax()) >= fmt.overflow_threshold:
        past = (round_nearest(exact, fmt) - exact).square_().div_(spacing)
        error = torch.where(past > 1, past + noise, error)
    return error.mul_(spacing).sqrt_().nan_to_num_(0.0, torch.inf)


def _of_rounding(offset: Tensor, noise: Tensor, least: float, most: float) -> Tensor:
    """What ``after_rounding`` sums, in squared spacings; ``noise`` is r^2, from ``least`` to ``most``."""
    small = noise.clamp(max=_LOUD).float()
    if most < _FINE:
        return _neighbours(offset, small).double()
    if least >= _FINE:
        return _waves(offset, small).double().add_(noise)
    # A choice by condition would take as long as all of this; weights of 0 and 1 are exact.
    loud = (noise >= _FINE).float()
    error = torch.lerp(_neighbours(offset, small), _waves(offset, small), loud).double()
    return error.addcmul_(noise, loud.double())


def _waves(offset: Tensor, noise: Tensor) -> Tensor:
    """1/12 and four terms of the sum over k, in squared spacings; ``noise`` is r^2."""
    first = torch.cos(offset * (2 * math.pi))
    fading, quadruple = torch.exp(noise * (-2 * math.pi**2)), noise * 4
    error = (first * fading).mul_(quadruple + 1 / math.pi**2).neg_().add_(1 / 12)
    fourfold = fading.square().square_().clamp_(min=1e-9)  # subnormal powers take twenty times as long
    second = first.square().mul_(2.0).sub_(1.0)
    error.addcmul_(second * fourfold, quadruple + 1 / (2 * math.pi) ** 2)
    eightfold = fourfold.square_()
    third = (first * second).mul_(2.0).sub_(first)
    error.addcmul_(third.mul_(eightfold).mul_(fading), quadruple + 1 / (3 * math.pi) ** 2, value=-1)
    fourth = second.square_().mul_(2.0).sub_(1.0)
    return error.addcmul_(fourth.mul_(eightfold.square_()), quadruple.add_(1 / (4 * math.pi) ** 2))


def _neighbours(offset: Tensor, noise: Tensor) -> Tensor:
    """The nearest stored value and its neighbours with the masses that round to them, in squared spacings."""
    factor = (0.5 / noise).clamp_(max=1e30).sqrt_()
    edges = torch.stack([0.5 + offset, 0.5 - offset])
    # Past 9 fp32's erfc is subnormal or 0, and takes twenty times as long.
    mass = torch.special.erfc(factor.mul(edges).clamp_(max=9.0))
    outward: Tensor = mass.sub_(1e-36).clamp_(min=0.0).mul_(edges).sum(0)
    return outward.addcmul_(offset, offset)


def _with_sink(x: Tensor, rows: SoftmaxRows) -> Tensor:
    """(B, H, Nq, Nk) with a column of zeros for the sink where there is one."""
    return torch.nn.functional.pad(x, (0, 1)) if rows.has_sink else x


def _probability_rounding(
    weights: WeightErrors, arithmetic: Arithmetic
) -> tuple[Tensor | None, Tensor | None]:
    """(shift, variance) of rounding P, in shares of the row, (B, H, Nq, n); None where there is none.

    Where the tiling is declared the errors are known, sign included; elsewhere their variance is that of a
    uniform error over one spacing of the value that most weights are rounded at.
    """
    rows = weights.rows
    fmt, factor = arithmetic.probability_format, arithmetic.probability_scale
    if fmt.precision >= 24:
        return None, None
    one_chain = arithmetic.rescale_threshold == 0 and arithmetic.splits == 1
    known = weights.tiling.running_max is not None and one_chain
    if arithmetic.normalise == "before_product":
        weight, share = rows.p, None
        size = rows.lse.abs() + 1
    elif weights.tiling.running_max is None:  # most weights are rounded against the final maximum
        weight, share = rows.p * rows.row_sum, 1.0 / rows.row_sum
        size = rows.row_max.abs() + arithmetic.lift + rows.gap
    elif known:
        return _rounding_in_tiles(weights)
    else:
        running = weights.tiling.running_max
        weight = weights.in_tiles
        share = weights.carried
        size = weights.tiling.per_key(running.abs()) + arithmetic.lift + rows.gap
    value = weight if factor == 1.0 else weight * factor
    spacing = ulp(value, fmt)
    stored = round_to_spacing(value, spacing, fmt)
    inexact = (stored != value).double()
    half = spacing.mul_(0.5)
    if factor != 1.0:
        half.div_(factor)
    # A representable operand (P = 1 at the maximum) rounds to itself, unless fp32 errors move it.
    moved = torch.minimum(half, (ROUNDING_RMS * UNIT) * size * weight)
    deviation = moved.mul_(1.0 - inexact)
    shift = stored.sub_(value).div_(factor) if known else None
    if shift is None:
        deviation.addcmul_(torch.minimum(weight, half.mul_(3.0**-0.5)), inexact)
    if share is not None:
        deviation.mul_(share)
        shift = None if shift is None else shift.mul_(share)
    return shift, deviation.square_()


def _rounding_in_tiles(weights: WeightErrors) -> tuple[Tensor, Tensor]:
    """``_probability_rounding`` of a declared tiling: what each weight is off by is known."""
    rows, weight, share = weights.rows, weights.in_tiles, weights.carried
    fmt, factor = weights.arithmetic.probability_format, weights.arithmetic.probability_scale
    running = weights.tiling.running_max
    assert running is not None
    shift = weights.stored_in_tiles - weight
    # A representable operand (P = 1 at the maximum) rounds to itself, unless fp32 errors move it: few do.
    exact = (shift == 0).logical_and_(weight > 0)
    size = weights.tiling.per_key(running.abs()).expand_as(weight)[exact] + rows.gap[exact]
    size += weights.arithmetic.lift
    some = weight[exact]
    moved = torch.minimum(some * (ROUNDING_RMS * UNIT) * size, half_ulp(some * factor, fmt).div_(factor))
    variance = torch.zeros_like(weight)
    variance[exact] = moved.mul_(share.expand_as(weight)[exact]).square_()
    return shift.mul_(share), variance
