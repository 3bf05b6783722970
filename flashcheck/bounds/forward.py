"""Worst-case elementwise bounds for the forward pass: THEORY.md section 3 (tier A)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from flashcheck.arithmetic import Arithmetic, Machine
from flashcheck.bounds import centred, rms
from flashcheck.bounds.interval import rounded_interval
from flashcheck.bounds.numbers import FP32_MAX, SMALLEST_FP32, UNIT, is_power_of_two, weighted_growth
from flashcheck.bounds.result import ForwardBound, TensorBound
from flashcheck.bounds.rows import SoftmaxRows, softmax_rows
from flashcheck.bounds.scores import ScoreError, score_error
from flashcheck.bounds.weights import (
    ProbabilityRounding,
    WeightErrors,
    centred_errors,
    probability_rounding,
    weight_errors,
)
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
    errors = score_error(problem, exact, arithmetic, machine)
    rows = softmax_rows(problem, exact, errors)
    weights = weight_errors(rows, errors, arithmetic, machine)
    probability = probability_rounding(rows, weights, arithmetic)
    out_error = _out_error(rows, weights, probability, arithmetic, machine)
    if problem.v_descale != 1.0:  # [O5] one more product per output
        out_error = out_error * (1 + 2 * UNIT) + 2 * UNIT * rows.out.abs()
    lse_error = _lse_error(rows, weights, probability, errors, arithmetic, machine)
    judged = rows.live
    seen = exact.visible.any(-1, keepdim=True) | (problem.sink is not None)
    unlimited = seen & ~judged
    overflow = (errors.overflow.unsqueeze(-1) | weights.overflow) & judged
    sum_overflow = _sum_may_overflow(rows, arithmetic) & judged
    out_interval = rounded_interval(
        exact.out.nan_to_num(0.0, 0.0, 0.0),
        torch.where(unlimited, torch.inf, torch.where(judged, out_error, 0.0)),
        arithmetic.output_format,
        (overflow | sum_overflow).expand_as(exact.out),
    )
    lse_unlimited = unlimited.squeeze(-1)
    lse_interval = rounded_interval(
        torch.where(lse_unlimited, 0.0, exact.lse),
        torch.where(lse_unlimited, torch.inf, torch.where(judged, lse_error, 0.0).squeeze(-1)),
        arithmetic.lse_format,
        overflow.squeeze(-1),
    )
    linear = judged & rms.first_order(rows.p, weights.relative)
    sigma_out, sigma_lse = rms.forward_sigma(problem, rows, weights, arithmetic, machine)
    sharp = arithmetic.output_format.precision <= 11
    centred_interval = None
    if centred.forward_applies(arithmetic) and problem.v_descale == 1.0:
        centred_interval = centred.forward_interval(
            rows, weights, arithmetic, machine, (overflow | sum_overflow).expand_as(exact.out)
        )
    return ForwardBound(
        out=TensorBound(
            out_interval,
            torch.where(linear, rms.after_rounding(rows.out, sigma_out, arithmetic.output_format), 0.0),
            linear.expand_as(rows.out),
            sharp,
            centred_interval,
        ),
        lse=TensorBound(
            lse_interval,
            torch.where(linear, rms.after_rounding(rows.lse, sigma_lse, arithmetic.lse_format), 0.0).squeeze(
                -1
            ),
            linear.squeeze(-1),
            prediction_gates=False,
        ),
    )


def _out_error(
    rows: SoftmaxRows,
    weights: WeightErrors,
    probability: ProbabilityRounding,
    arithmetic: Arithmetic,
    machine: Machine,
) -> Tensor:
    """Terms [O1] to [O4] of THEORY.md section 3.6: the error before the output is rounded."""
    values, out = rows.values, rows.out
    num_keys = values.shape[-2]
    if num_keys == 0:
        return torch.zeros_like(out)
    stacked = torch.cat([values.abs(), values.square(), values], -1)
    flush = torch.where(rows.visible, weights.flush / weights.denominator, 0.0)
    first = _spread(weighted_growth(rows.log_p, weights.relative) + flush, stacked, out)
    first = first / torch.exp(rows.log_p - weights.relative).sum(-1, keepdim=True)
    centred = centred_errors(rows, weights)
    second = _spread(weighted_growth(rows.log_p, centred) + flush, stacked, out)
    second = second / torch.exp(rows.log_p - centred).sum(-1, keepdim=True)
    highest, lowest = values.amax(-2, keepdim=True), values.amin(-2, keepdim=True)
    hull = torch.maximum(highest - out, out - lowest).clamp(min=0.0)
    softmax = torch.minimum(torch.minimum(first.nan_to_num(torch.inf), second.nan_to_num(torch.inf)), hull)
    unit = machine.accumulator(arithmetic.product_format or arithmetic.probability_format)
    rescaling = weights.rescales * UNIT
    sums = machine.vector.gamma(num_keys) + rescaling  # [O1]
    if not is_power_of_two(arithmetic.probability_scale):
        sums += UNIT
    used = probability.largest + probability.error
    accumulated = (unit.gamma(num_keys) + rescaling) * (used @ values.abs())  # [O2]
    in_units = arithmetic.normalise == "after_product"
    scaled = arithmetic.probability_scale * (weights.denominator if in_units else torch.ones(()))
    accumulated = accumulated + num_keys * SMALLEST_FP32 / scaled
    if unit.fraction_bits is not None:
        operand = arithmetic.product_format or arithmetic.probability_format
        tiny = 2.0**operand.min_exponent
        steps = -(-num_keys // unit.block) + weights.rescales
        lost = steps * (unit.block + 1) * 2.0**-unit.fraction_bits * tiny
        accumulated = accumulated + lost * (values.abs().amax(-2, keepdim=True) + 1.0) / scaled
    if arithmetic.row_sum == "rounded":  # [O3]
        share = probability.error.sum(-1, keepdim=True).clamp(max=0.999)
        moved = _spread(probability.error, stacked, out)
        softmax = torch.minimum(softmax + (moved + share * softmax) / (1 - share), hull)
        rounding = torch.zeros_like(softmax)
    else:
        rounding = probability.error @ values.abs()
    quotient = (1 + machine.division_error) / max(1 - sums, 2.0**-20) - 1  # [O4]
    return softmax + (rounding + accumulated) * (1 + quotient) + quotient * (out.abs() + softmax)


def _spread(weight: Tensor, stacked: Tensor, out: Tensor) -> Tensor:
    """Upper limit of sum_j W_ij |v_jd - O_id| from matrix products alone.

    The smaller of W|V| + |O| sum W (triangle) and sqrt(sum W * sum W (v - O)^2) (Cauchy-Schwarz).
    ``stacked`` holds |V|, V^2 and V side by side. THEORY.md 3.4.
    """
    total = weight.sum(-1, keepdim=True)
    absolute, square, plain = (weight @ stacked).chunk(3, -1)
    triangle = absolute + out.abs() * total
    centre = out.square() * total
    variance = (square - 2 * out * plain + centre).clamp(min=0.0) + 1e-14 * (square + centre)
    return torch.minimum(triangle, (total * variance).sqrt().nan_to_num(torch.inf))


def _lse_error(
    rows: SoftmaxRows,
    weights: WeightErrors,
    probability: ProbabilityRounding,
    errors: ScoreError,
    arithmetic: Arithmetic,
    machine: Machine,
) -> Tensor:
    """Terms [L1] to [L4] of THEORY.md section 3.7, (B, H, Nq, 1)."""
    size = rows.row_max.abs() + weights.own_max
    constant = 0.0 if errors.additive else errors.constant
    absolute = torch.where(
        rows.visible, weights.relative + constant * rows.row_max.abs() + 2 * UNIT * size, 0.0
    )
    growth = weighted_growth(rows.log_p, absolute).sum(-1, keepdim=True)
    moved = torch.log1p(growth)  # [L1]
    if absolute.shape[-1]:  # log-sum-exp moves by no more than the largest move; the growth is clipped
        largest = absolute.amax(-1, keepdim=True)
        moved = torch.where(largest < 500.0, moved, largest)
    if arithmetic.row_sum == "rounded":  # [L2]
        moved = moved - torch.log1p(-probability.error.sum(-1, keepdim=True).clamp(max=0.999))
    sums = machine.vector.gamma(rows.values.shape[-2]) + weights.rescales * UNIT
    log_sum = torch.log(rows.row_sum).abs() + moved
    logarithm = torch.clamp(machine.log_relative * (log_sum + 2 * sums), min=machine.log_absolute)
    result = moved - math.log1p(-min(sums, 0.999)) + logarithm  # [L3]
    result = (
        result + 2 * UNIT * (log_sum + 1) + 4 * UNIT * size + weights.flush * rows.values.shape[-2]
    )  # [L4]
    return torch.where(torch.isinf(weights.own_max), torch.inf, result)


def _sum_may_overflow(rows: SoftmaxRows, arithmetic: Arithmetic) -> Tensor:
    """Rows whose unnormalised sum c * sum exp(s - m) |v| may pass fp32's largest number on the way."""
    if not rows.values.shape[-2]:
        return torch.zeros_like(rows.out, dtype=torch.bool)
    if arithmetic.normalise == "before_product":
        return torch.zeros_like(rows.out, dtype=torch.bool)
    factor = arithmetic.probability_scale * 2.0**arithmetic.rescale_threshold
    seen = rows.visible.sum(-1, keepdim=True)
    largest: Tensor = factor * seen * rows.values.abs().amax(-2, keepdim=True)
    return largest * 1.001 >= FP32_MAX
