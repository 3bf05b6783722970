"""Errors of the recomputed tiles of a backward pass: THEORY.md sections 4.1 and 4.2."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from flashcheck.arithmetic import Arithmetic, Machine
from flashcheck.bounds.numbers import (
    FP32_MAX,
    ORACLE_SHARE,
    SMALLEST_FP32,
    UNIT,
    is_power_of_two,
    weighted_growth,
)
from flashcheck.bounds.scores import score_error
from flashcheck.bounds.tiling import SMALLEST_TILE
from flashcheck.formats import Format, half_ulp
from flashcheck.oracle.quantities import BackwardQuantities, ForwardQuantities
from flashcheck.problem import Problem

_NEAR_MAX = FP32_MAX * (1 - 2.0**-10)


@dataclass(frozen=True, slots=True)
class PairErrors:
    """Errors of the recomputed tiles, (B, H, Nq, Nk), 0 where hidden; ``p`` and ``ds`` are exact.

    Attributes:
        p: exact exp(s - L); p_error: of the fp32 value; p_rounding: of putting it into its format.
        ds: exact dS (softcap's derivative included); ds_error and ds_rounding likewise.
        ds_plain, ds_plain_error: dS before softcap's derivative: the gradient of the bias.
        delta_error: (B, H, Nq, 1) error of rowsum(dO * O) - dLSE.
        relative: |log of computed p / exact p|.
        exp_error: log of 1 + the error of one exponential.
        overflow_p, overflow_ds: boolean, pairs whose score, or whose dP or delta, may leave fp32's range;
            hidden pairs too, whose P is 0: 0 * inf is NaN. overflow_delta: (B, H, Nq, 1) delta alone.
    """

    p: Tensor
    p_error: Tensor
    p_rounding: Tensor
    ds: Tensor
    ds_error: Tensor
    ds_rounding: Tensor
    ds_plain: Tensor
    ds_plain_error: Tensor
    delta_error: Tensor
    relative: Tensor
    exp_error: float
    overflow_p: Tensor
    overflow_ds: Tensor
    overflow_delta: Tensor


def pair_errors(
    problem: Problem,
    forward: ForwardQuantities,
    exact: BackwardQuantities,
    out: Tensor,
    lse: Tensor,
    arithmetic: Arithmetic,
    machine: Machine,
) -> PairErrors:
    """Terms [B1] to [B5] of THEORY.md section 4.1 and 4.2."""
    score = score_error(problem, forward, arithmetic, machine)
    visible = forward.visible & torch.isfinite(exact.probabilities)
    stored = torch.where(torch.isfinite(lse), lse.double(), 0.0).unsqueeze(-1)
    scores = torch.where(visible, forward.scores, 0.0)
    constant = 0.0 if score.additive else score.constant
    own = torch.where(visible, score.own, 0.0) * ORACLE_SHARE + constant * scores.abs()
    flush_limit = machine.exp_flush if arithmetic.exp_flush is None else arithmetic.exp_flush
    exp_error = -math.log1p(-(machine.exp_error if arithmetic.exp_error is None else arithmetic.exp_error))
    # [B1] No common shift cancels here: P is exp(s - L) with L given.
    shift = 2 * UNIT * stored.abs()
    relative = own + shift + UNIT * ((scores - stored).abs() + own + shift) + exp_error
    if arithmetic.normalise == "before_product":  # P comes from the forward: its row sum errs as well
        own_max = own.amax(-1, keepdim=True) if own.shape[-1] else 0.0
        relative = (
            relative + own_max + exp_error + machine.vector.gamma(own.shape[-1]) + machine.division_error
        )
    relative = torch.where(visible, relative, 0.0)
    p = torch.where(visible, exact.probabilities, 0.0)
    log_p = torch.where(visible, scores - stored, -torch.inf)
    p_error = torch.where(visible, weighted_growth(log_p, relative) + flush_limit, 0.0)
    p_rounding = _rounding(p + p_error, arithmetic.probability_format, arithmetic.probability_scale)  # [B2]
    # [B3] delta and dP
    dout = dout_of(problem)
    unit = machine.accumulator(arithmetic.product_format or arithmetic.input_format)
    values = problem.v.double().repeat_interleave(problem.group, 1) * problem.v_descale
    every_pair = dout.abs() @ values.abs().nan_to_num(0.0, 0.0).mT
    magnitude = torch.where(visible, every_pair, 0.0)
    dp_error = unit.gamma(problem.value_dim) * magnitude + problem.value_dim * SMALLEST_FP32
    delta_size = (dout * out.double().nan_to_num(0.0)).abs().sum(-1, keepdim=True)
    delta_error = machine.vector.gamma(problem.value_dim) * delta_size + problem.value_dim * SMALLEST_FP32
    delta = exact.delta.unsqueeze(-1)
    if problem.dlse is not None:
        delta_error = delta_error + UNIT * delta.abs()
    if arithmetic.normalise == "before_product":  # eager backward: delta = rowsum(P * dP)
        delta_error = delta_error + _eager_delta_error(p, p_error, magnitude, dp_error, machine)
    difference = torch.where(visible, exact.grad_probabilities - delta, 0.0)
    difference_error = dp_error + delta_error
    difference_error = difference_error + UNIT * (difference.abs() + difference_error)
    # [B4] dS = P (dP - delta)
    ds_plain = torch.where(visible, exact.grad_scores, 0.0)
    plain_error = p_error * difference.abs() + (p + p_error) * difference_error
    plain_error = plain_error + UNIT * (ds_plain.abs() + plain_error) + flush_limit
    plain_error = torch.where(visible, plain_error, 0.0)
    ds, ds_error = ds_plain, plain_error
    if problem.softcap is not None:
        ds, ds_error = _through_softcap(problem, forward, ds_plain, plain_error, own, machine, visible)
    overflow_p = visible & (score.overflow.unsqueeze(-1) | ~torch.isfinite(own) | (shift > 20.0))
    grad_format = arithmetic.grad_score_format or arithmetic.probability_format
    ds_rounding = _rounding(ds.abs() + ds_error, grad_format, 1.0)  # [B5]
    return PairErrors(
        p,
        p_error,
        p_rounding,
        ds,
        ds_error,
        ds_rounding,
        ds_plain,
        plain_error,
        delta_error,
        relative,
        exp_error,
        overflow_p,
        overflow_p | (every_pair + delta_size >= _NEAR_MAX),
        delta_size >= _NEAR_MAX,
    )


def dout_of(problem: Problem) -> Tensor:
    """The output gradient in float64, zero where the problem has none."""
    if problem.dout is None:
        return torch.zeros(
            problem.batch, problem.num_heads, problem.num_queries, problem.value_dim, dtype=torch.float64
        )
    return problem.dout.double()


def _rounding(largest: Tensor, fmt: Format, factor: float) -> Tensor:
    """Error of rounding a value of magnitude at most ``largest`` into ``fmt``; inf past its range."""
    if fmt.precision >= 24:
        return torch.zeros_like(largest)
    error = torch.minimum(largest, half_ulp(factor * largest, fmt) / factor)
    if not is_power_of_two(factor):
        error = error + UNIT * largest
    past = torch.inf if not fmt.saturates else largest
    return torch.where(factor * largest >= fmt.overflow_threshold, past, error)


def _eager_delta_error(
    p: Tensor, p_error: Tensor, magnitude: Tensor, dp_error: Tensor, machine: Machine
) -> Tensor:
    """delta = sum_j P_ij dP_ij: errors of both factors, and the sum."""
    terms = p_error * magnitude + (p + p_error) * dp_error
    size = ((p + p_error) * magnitude).sum(-1, keepdim=True)
    return terms.sum(-1, keepdim=True) + machine.vector.gamma(p.shape[-1]) * size


def _through_softcap(
    problem: Problem,
    forward: ForwardQuantities,
    ds: Tensor,
    error: Tensor,
    own: Tensor,
    machine: Machine,
    visible: Tensor,
) -> tuple[Tensor, Tensor]:
    """dS times sech^2(x / c) = 1 - tanh^2: the derivative errs by 2 (tanh error + own/c) + 3 u."""
    cap = problem.softcap or 1.0
    x = torch.where(visible, forward.products, 0.0)
    slope = 1 / torch.cosh((x / cap).clamp(-350, 350)).square()
    slope_error = 2 * (machine.tanh_error + own / cap + 3 * UNIT * (x / cap).abs().clamp(max=0.5)) + 3 * UNIT
    through = ds * slope
    result = ds.abs() * slope_error + error * (slope + slope_error)
    return through, result + UNIT * (through.abs() + result)


def sum_group(x: Tensor, problem: Problem) -> Tensor:
    """(B, H, ...) summed over the query heads of each group: (B, Hkv, ...)."""
    if problem.group == 1:
        return x
    return x.view(x.shape[0], problem.num_kv_heads, problem.group, *x.shape[2:]).sum(2)


def tiles_of(length: int, block: int | None) -> int:
    """Tiles along a length; an undeclared tile has at least SMALLEST_TILE entries."""
    return max(-(-length // (block or SMALLEST_TILE)), 1)
