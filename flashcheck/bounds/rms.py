"""Predicted rms error per element of the forward pass: THEORY.md section 5."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from flashcheck.arithmetic import Accumulator, Arithmetic, Machine
from flashcheck.bounds.numbers import UNIT
from flashcheck.bounds.rows import SoftmaxRows
from flashcheck.bounds.weights import WeightErrors
from flashcheck.formats import Format, half_ulp, round_nearest
from flashcheck.problem import Problem

ROUNDING_RMS = 0.4247
"""rms of the relative error of rounding to nearest, in units of u, for a log-uniform significand."""

LARGEST_LINEAR = 2.0**-6
"""First-order predictions hold while log-weight errors stay below this."""


def first_order(p: Tensor, relative: Tensor) -> Tensor:
    """(B, H, Nq, 1): rows in which every weight that matters has a small error."""
    if not p.shape[-1]:
        return torch.zeros(*p.shape[:-1], 1, dtype=torch.bool)
    worst = torch.where(p > 1e-12, relative, 0.0).amax(-1, keepdim=True)
    return worst < LARGEST_LINEAR


def forward_sigma(
    problem: Problem,
    rows: SoftmaxRows,
    weights: WeightErrors,
    arithmetic: Arithmetic,
    machine: Machine,
) -> tuple[Tensor, Tensor]:
    """Standard deviations of out (B, H, Nq, dv) and lse (B, H, Nq, 1) before they are rounded."""
    values, out, p = rows.values, rows.out, rows.p
    num_keys = values.shape[-2]
    if num_keys == 0:
        return torch.zeros_like(out), torch.zeros_like(rows.lse)
    rounding = _probability_variance(rows, weights, arithmetic)
    gap = rows.row_max - rows.scores
    log_weight = score_variance(problem, rows.visible, rows.scores, arithmetic, machine)
    log_weight = log_weight + 0.36 * (UNIT * gap).square() + (weights.exp_error / 1.73) ** 2
    scores = p.square() * log_weight
    square = values.square()
    if arithmetic.row_sum == "rounded":
        variance = _centred(rounding + scores, values, square, out)
    else:
        variance = rounding @ square + _centred(scores, values, square, out)
    drift = p * _score_bias(problem, rows, arithmetic, machine)
    drift_total = drift.sum(-1, keepdim=True)
    variance = variance + (drift @ values - out * drift_total).square()
    unit = machine.accumulator(arithmetic.product_format or arithmetic.probability_format)
    variance = variance + accumulation_variance(unit, num_keys, out, p.square() @ square)
    variance = variance + accumulation_bias(unit, num_keys, out).square()
    variance = variance + (0.6 * machine.division_error * out).square()
    total = scores.sum(-1, keepdim=True) + accumulation_variance(
        machine.vector, num_keys, torch.ones(()), torch.ones(())
    )
    if arithmetic.row_sum == "rounded":
        total = total + rounding.sum(-1, keepdim=True)
    total = total + drift_total.square() + 3 * (ROUNDING_RMS * UNIT * rows.row_max).square()
    total = total + (0.25 * machine.log_absolute) ** 2
    return variance.sqrt(), total.sqrt()


def after_rounding(exact: Tensor, sigma: Tensor, fmt: Format) -> Tensor:
    """sqrt(E[(RN(exact + sigma Z) - exact)^2]) for a standard normal Z; shape of ``exact``.

    Where sigma is below 0.6 spacings the sum runs over the neighbouring stored values (an exactly
    representable value then has error 0). From there on the rounding is one more independent error:
    the correction to that is of relative size 2 exp(-2 pi^2 (sigma / spacing)^2) < 0.002.
    """
    half = half_ulp(exact, fmt)
    spacing = 2 * half
    continuous = sigma.square() + half.square() / 3
    offset = (round_nearest(exact, fmt) - exact) / spacing
    spread = (sigma / spacing).clamp(min=1e-300)
    # Mass of each cell [k - 1/2, k + 1/2] around the nearest stored value, k = -3 .. 3, in spacings.
    below = torch.zeros_like(exact)
    discrete = torch.zeros_like(exact)
    for k in range(-3, 4):
        edge = (offset + (k + 0.5)) / spread
        up_to = torch.ones_like(exact) if k == 3 else 0.5 + 0.5 * torch.erf(edge * math.sqrt(0.5))
        discrete += (up_to - below) * (offset + k).square()
        below = up_to
    return (
        torch.where(sigma < 0.6 * spacing, discrete * spacing.square(), continuous)
        .sqrt()
        .nan_to_num(0.0, 0.0)
    )


def _probability_variance(rows: SoftmaxRows, weights: WeightErrors, arithmetic: Arithmetic) -> Tensor:
    """Variance of rounding P, in shares of the row: known operand, uniform error over one spacing."""
    fmt, factor = arithmetic.probability_format, arithmetic.probability_scale
    if fmt.precision >= 24:
        return torch.zeros_like(rows.p)
    if arithmetic.normalise == "before_product":
        weight, share = rows.p, torch.ones(())
        local = ROUNDING_RMS * UNIT * (rows.lse.abs() + 1) * weight
    else:
        reference = rows.row_max if weights.running_max is None else weights.running_max
        weight = torch.where(rows.visible, torch.exp(rows.scores - reference), 0.0)
        share = torch.exp(reference - rows.row_max) / rows.row_sum
        local = ROUNDING_RMS * UNIT * (reference.abs() + rows.row_max - rows.scores) * weight
    half = half_ulp(factor * weight, fmt) / factor
    exactly = round_nearest(factor * weight, fmt) == factor * weight
    variance = torch.where(
        exactly,
        torch.minimum(local, half).square(),
        torch.minimum(weight.square(), half.square() / 3),
    )
    return torch.where(rows.visible, variance * share.square(), 0.0)


def score_variance(
    problem: Problem, visible: Tensor, scores: Tensor, arithmetic: Arithmetic, machine: Machine
) -> Tensor:
    """Variance of each computed score, (B, H, Nq, n); n counts the sink as a key where there is one."""
    q = problem.q.double().nan_to_num(0.0, 0.0, 0.0).square()
    k = problem.k.double().nan_to_num(0.0, 0.0, 0.0).square().repeat_interleave(problem.group, 1)
    scale = problem.effective_scale
    terms = scale**2 * (q @ k.transpose(-1, -2))
    if scores.shape[-1] > terms.shape[-1]:
        terms = torch.nn.functional.pad(terms, (0, 1))
    operand = arithmetic.product_format or arithmetic.input_format
    variance = accumulation_variance(machine.accumulator(operand), problem.head_dim, scores, terms)
    if arithmetic.scale_placement == "operands":
        variance = variance + 2 * (ROUNDING_RMS * UNIT) ** 2 * terms
    if arithmetic.scale_placement == "scores" or not machine.fused_multiply_add:
        variance = variance + (ROUNDING_RMS * UNIT * scores).square()
    if arithmetic.score_format is not None and scale:
        stored = (scores / scale).abs() * arithmetic.score_scale
        half = half_ulp(stored, arithmetic.score_format) / arithmetic.score_scale
        variance = variance + (scale * half).square() / 3
    variance = variance + arithmetic.score_roundings * (ROUNDING_RMS * UNIT * scores).square()
    if arithmetic.scaled_score_format is not None:
        variance = variance + half_ulp(scores, arithmetic.scaled_score_format).square() / 3
    return torch.where(visible, variance, 0.0)


def accumulation_variance(unit: Accumulator, terms: int, total: Tensor, squares: Tensor) -> Tensor:
    """Variance of summing ``terms`` products to ``total``; ``squares``: sum of squares.

    Each partial sum of a sequential summation is rounded once. Sums that are split over lanes err less:
    this is the upper end.
    """
    steps = -(-terms // unit.block)
    partial = partial_squares(steps, total, squares)
    if unit.rounding == "nearest":
        variance = (ROUNDING_RMS * unit.step_error) ** 2 * partial
    else:
        variance = 0.25 * (ROUNDING_RMS * unit.step_error) ** 2 * partial
    if unit.fraction_bits is not None:
        variance = variance + (0.25 * 2.0**-unit.fraction_bits) ** 2 * (4 * squares + partial)
    return variance


def partial_squares(steps: int, total: Tensor, squares: Tensor) -> Tensor:
    """Expected sum of S_k^2 over the partial sums of ``steps`` equal parts, given where they end.

    The terms in random order, the last sum S known: E S_k^2 = (k/n)^2 S^2 + (k/n)(1 - k/n) Q with
    Q = ``squares``, the sum of squared terms (a Brownian bridge).
    """
    if steps < 1:
        return torch.zeros_like(total * squares)
    ends = (steps + 1) * (2 * steps + 1) / (6 * steps)
    bridge = (steps * steps - 1) / (6 * steps)
    return ends * total.square() + bridge * squares


def accumulation_bias(unit: Accumulator, terms: int, total: Tensor) -> Tensor:
    """Mean error of a sum whose partial sums are truncated: 0.36 of a spacing at each, toward zero."""
    if unit.rounding == "nearest":
        return torch.zeros_like(total)
    steps = -(-terms // unit.block)
    return -0.36 * unit.step_error * (steps + 1) / 2 * total


def _score_bias(problem: Problem, rows: SoftmaxRows, arithmetic: Arithmetic, machine: Machine) -> Tensor:
    """Mean error of each score, (B, H, Nq, n): it moves the scores of a row together, so it does not
    average out over keys as independent errors do."""
    unit = machine.accumulator(arithmetic.product_format or arithmetic.input_format)
    bias = accumulation_bias(unit, problem.head_dim, rows.scores)
    return torch.where(rows.visible, bias, 0.0)


def _centred(weight: Tensor, values: Tensor, square: Tensor, out: Tensor) -> Tensor:
    """sum_j W_ij (v_jd - O_id)^2."""
    total = weight.sum(-1, keepdim=True)
    return (weight @ square - 2 * out * (weight @ values) + out.square() * total).clamp(min=0.0)
