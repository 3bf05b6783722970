"""Worst-case elementwise bounds for the forward pass: THEORY.md section 3 (tier A)."""

from __future__ import annotations

import math
from functools import cache

import torch
from torch import Tensor

from flashcheck.arithmetic import Arithmetic, Machine
from flashcheck.bounds import centred, rms
from flashcheck.bounds.alignment import subnormal_values
from flashcheck.bounds.alike import alike_weights
from flashcheck.bounds.interval import Interval, rounded_interval
from flashcheck.bounds.numbers import (
    FP32_MAX,
    LARGEST_LINEAR,
    UNIT,
    flushed,
    weighted_growth,
)
from flashcheck.bounds.products import weighted
from flashcheck.bounds.result import ForwardBound, Prediction, TensorBound
from flashcheck.bounds.rows import SoftmaxRows, softmax_rows
from flashcheck.bounds.scores import ScoreError, score_error
from flashcheck.bounds.spread import Deviations
from flashcheck.bounds.tiling import SMALLEST_TILE
from flashcheck.bounds.weights import (
    ProbabilityRounding,
    WeightErrors,
    centred_errors,
    probability_rounding,
    weight_errors,
)
from flashcheck.formats import Format, is_power_of_two
from flashcheck.oracle.quantities import ForwardQuantities
from flashcheck.problem import Problem


def forward_bound(
    problem: Problem, exact: ForwardQuantities, arithmetic: Arithmetic, machine: Machine
) -> ForwardBound:
    """Bounds on out and log-sum-exp that any kernel with this arithmetic on this machine obeys.

    Args:
        problem: the problem judged.
        exact: the oracle's quantities for it.
        arithmetic: what the kernel declares.
        machine: how the hardware rounds.

    Returns:
        Intervals for out (B, H, Nq, dv) and lse (B, H, Nq), and predicted rms errors. Rows whose exact
        answer is not finite are unlimited here: the checks for non-finite values judge them.

    Source: THEORY.md section 3.
    """
    machine = arithmetic.on(machine)
    errors = score_error(problem, exact, arithmetic, machine)
    rows = softmax_rows(problem, exact, errors)
    weights = weight_errors(rows, errors, arithmetic, machine)
    probability = probability_rounding(weights, arithmetic)
    out_error = _out_error(weights, probability, arithmetic, machine)
    if problem.v_descale != 1.0:  # [O5] one more product per output
        out_error = out_error * (1 + 2 * UNIT) + 2 * UNIT * rows.out.abs()
    lse_error = _lse_error(weights, probability, errors, arithmetic, machine)
    judged = rows.live
    overflow = (
        weights.overflow if errors.overflow is None else errors.overflow.unsqueeze(-1) | weights.overflow
    )
    overflow = overflow & judged
    may_overflow = (overflow | (_sum_may_overflow(rows, arithmetic) & judged)).expand_as(exact.out)
    out, lse, lse_error = exact.out, exact.lse, lse_error.squeeze(-1)
    # Rows that hide every key have no finite log-sum-exp, but for a sink.
    whole = errors.visible is None or problem.sink is None
    if not (rows.all_live and whole and problem.num_keys):  # else all rows are judged
        keys_seen = exact.visible.any(-1, keepdim=True)
        unlimited = (keys_seen | (problem.sink is not None)) & ~judged
        out = out.nan_to_num(0.0, 0.0, 0.0)
        out_error = torch.where(unlimited, torch.inf, torch.where(judged & keys_seen, out_error, 0.0))
        rows_unlimited = unlimited.squeeze(-1)
        lse = torch.where(rows_unlimited, 0.0, lse)
        lse_error = torch.where(judged.squeeze(-1), lse_error, 0.0)
        lse_error = torch.where(rows_unlimited, torch.inf, lse_error)
    out_interval = rounded_interval(out, out_error, arithmetic.output_format, may_overflow)
    lse_interval = rounded_interval(lse, lse_error, arithmetic.lse_format, overflow.squeeze(-1))

    @cache
    def variances() -> tuple[Tensor, Tensor]:
        return rms.forward_variance(problem, errors.noise, weights, arithmetic, machine)

    def prediction(value: Tensor, variance: Tensor, fmt: Format) -> Prediction:
        holds = (judged & rms.first_order(weights)).expand_as(value)
        return Prediction.where(rms.after_rounding(value, variance, fmt), holds)

    def of_lse() -> Prediction:
        whole = prediction(rows.lse, variances()[1], arithmetic.lse_format)
        return Prediction(whole.rms.squeeze(-1), whole.holds.squeeze(-1))

    def centre() -> Interval | None:
        if not centred.forward_applies(arithmetic) or problem.v_descale != 1.0:
            return None
        return centred.forward_interval(weights, arithmetic, machine, may_overflow)

    return ForwardBound(
        out=TensorBound(
            out_interval,
            lambda: prediction(rows.out, variances()[0], arithmetic.output_format),
            arithmetic.output_format.precision <= 11,
            centre,
            lambda: alike_weights(exact, arithmetic.probability_format),
        ),
        lse=TensorBound(lse_interval, of_lse, prediction_gates=False, centre=lambda: None),
        scores=errors,
        weights=weights,
        variance=lambda: variances()[0],
    )


def _out_error(
    weights: WeightErrors, probability: ProbabilityRounding, arithmetic: Arithmetic, machine: Machine
) -> Tensor:
    """Terms [O1] to [O4] of THEORY.md section 3.6: the error before the output is rounded."""
    rows = weights.rows
    out, problem, num_keys = rows.out, rows.problem, rows.num_keys
    if num_keys == 0:
        return torch.zeros_like(out)
    deviations = rows.deviations
    softmax = _softmax_error(weights, deviations)
    unit = machine.accumulator(arithmetic.product_format or arithmetic.probability_format)
    rescaling = weights.rescales * UNIT
    sums = machine.vector.gamma(num_keys) + rescaling  # [O1]
    if not is_power_of_two(arithmetic.probability_scale):
        sums += UNIT
    gamma = unit.gamma(num_keys, arithmetic.block_keys or SMALLEST_TILE) + rescaling  # [O2]
    charged = probability.largest * gamma
    if probability.error is not None:
        rounded_sum = arithmetic.row_sum == "rounded"
        charged.add_(probability.error, alpha=gamma + (0.0 if rounded_sum else 1.0))  # [P1]
        if rounded_sum:  # [O3]
            share = probability.error.sum(-1, keepdim=True).clamp(max=0.999)
            moved = deviations.weighted(probability.error)
            softmax = torch.minimum(softmax + (moved + share * softmax) / (1 - share), deviations.hull)
    summed = weighted(problem, charged, rows.sizes)
    scaled = weights.scaled
    floor = unit.floor(num_keys) * max(problem.v_descale, 1.0) / scaled
    if lost := flushed(machine):  # [O6]
        floor = floor + (2 * weights.rescales + 1) * lost * max(problem.v_descale, 1.0) / scaled + 2 * lost
    if unit.alignment or unit.flush_subnormals:
        shares = probability.largest
        shares = shares if probability.error is None else shares + probability.error
        steps = -(-num_keys // unit.block) + weights.rescales
        floor = floor + subnormal_values(rows, shares, scaled, unit, steps, arithmetic)
    quotient = (1 + machine.division_error) / max(1 - sums, 2.0**-20) - 1  # [O4]
    return softmax + (summed + floor) * (1 + quotient) + quotient * (out.abs() + softmax)


def _softmax_error(weights: WeightErrors, deviations: Deviations) -> Tensor:
    """The three limits of THEORY.md section 3.4, of which the smallest counts."""
    rows = weights.rows
    flush = weights.flush / weights.denominator
    growth = _flushed(weights.growth(), weights, flush)
    first = deviations.weighted(growth) / weights.spread
    softmax = torch.minimum(first.nan_to_num(torch.inf), deviations.hull)
    if weights.linear:  # the second limit gains where errors are large only
        return softmax
    centred = centred_errors(weights)
    second = deviations.weighted(_flushed(weights.growth(centred), weights, flush))
    second = second / torch.exp(rows.log_p - centred).sum(-1, keepdim=True)
    return torch.minimum(softmax, second.nan_to_num(torch.inf))


def _flushed(growth: Tensor, weights: WeightErrors, flush: Tensor) -> Tensor:
    """``growth``, in place, and what visible weights lose where results under the limit may be 0."""
    if not weights.flush:
        return growth
    mask = weights.rows.mask
    return growth.add_(flush) if mask is None else growth.addcmul_(mask, flush)


def _lse_error(
    weights: WeightErrors,
    probability: ProbabilityRounding,
    errors: ScoreError,
    arithmetic: Arithmetic,
    machine: Machine,
) -> Tensor:
    """Terms [L1] to [L4] of THEORY.md section 3.7, (B, H, Nq, 1)."""
    rows = weights.rows
    size = rows.row_max.abs() + weights.own_max + arithmetic.lift
    constant = 0.0 if errors.additive else errors.constant
    common = constant * rows.row_max.abs() + 2 * UNIT * size
    worst = weights.worst + (float(common.amax()) if common.numel() else 0.0)
    if worst <= LARGEST_LINEAR and weights.moved_sum is not None:  # [L1]
        moved = (weights.moved_sum + common) * (1 + worst)
    else:
        absolute = rows.hide(weights.relative + common)
        moved = torch.log1p(weighted_growth(rows.log_p, absolute).sum(-1, keepdim=True))
        if rows.num_keys:  # log-sum-exp moves by no more than the largest move; the growth is clipped
            largest = absolute.amax(-1, keepdim=True)
            moved = torch.where(largest < 500.0, moved, largest)
    if arithmetic.row_sum == "rounded" and probability.error is not None:  # [L2]
        moved = moved - torch.log1p(-probability.error.sum(-1, keepdim=True).clamp(max=0.999))
    sums = machine.vector.gamma(rows.num_keys) + weights.rescales * UNIT
    log_sum = torch.log(rows.row_sum).abs() + moved + arithmetic.lift
    logarithm = torch.clamp(machine.log_relative * (log_sum + 2 * sums), min=machine.log_absolute)
    result = moved - math.log1p(-min(sums, 0.999)) + logarithm  # [L3]
    result = result + 2 * UNIT * (log_sum + 1) + 4 * UNIT * size + weights.flush * rows.num_keys  # [L4]
    result = result + 8 * flushed(machine)
    return torch.where(torch.isinf(weights.own_max), torch.inf, result)


def _sum_may_overflow(rows: SoftmaxRows, arithmetic: Arithmetic) -> Tensor:
    """Elements whose unnormalised sum c * sum exp(s - m) |v| may pass fp32's largest number on the way;
    broadcasts."""
    never = torch.zeros((), dtype=torch.bool, device=rows.out.device)
    if not rows.num_keys or arithmetic.normalise == "before_product":
        return never
    factor = arithmetic.probability_scale * 2.0**arithmetic.rescale_threshold * 1.001
    largest = rows.deviations.most
    if not largest.numel() or float(largest.amax()) * factor * rows.num_keys < FP32_MAX:
        return never
    seen = rows.num_keys if rows.mask is None else rows.mask.sum(-1, keepdim=True)
    over: Tensor = factor * seen * largest >= FP32_MAX
    return over
