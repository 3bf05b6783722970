"""Errors of the recomputed tiles of a backward pass: THEORY.md sections 4.1 and 4.2."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from flashcheck.arithmetic import Arithmetic, Machine
from flashcheck.bounds.alignment import operand, subnormal_error
from flashcheck.bounds.exponential import exponential_of
from flashcheck.bounds.gradient_sums import dout_format, dout_of
from flashcheck.bounds.limits import Limits
from flashcheck.bounds.numbers import (
    FP32_MAX,
    LARGEST_EXPONENT,
    LARGEST_LINEAR,
    ORACLE_SHARE,
    SMALLEST_FP32,
    UNIT,
    flushed,
    weighted_growth,
)
from flashcheck.bounds.products import weighted
from flashcheck.bounds.score_noise import softcap_slope
from flashcheck.bounds.scores import ScoreError
from flashcheck.formats import Format
from flashcheck.oracle.quantities import BackwardQuantities, ForwardQuantities
from flashcheck.problem import Problem

_NEAR_MAX = FP32_MAX * (1 - 2.0**-10)


@dataclass(frozen=True, slots=True)
class Given:
    """The stored forward that a backward reads, and how far it may lie from the exact one.

    Attributes:
        out: (B, H, Nq, dv); lse: (B, H, Nq).
        lse_error: (B, H, Nq) bound on |lse - exact|; out_error: (B, H, Nq, dv) on |out - exact|. None:
            the exact gradients are conditional on ``out`` and ``lse``, which then have no error.
    """

    out: Tensor
    lse: Tensor
    lse_error: Tensor | None = None
    out_error: Tensor | None = None


@dataclass(frozen=True, slots=True)
class PairErrors:
    """Errors of the recomputed tiles, (B, H, Nq, Nk); ``p`` and ``ds`` are exact, 0 where hidden.

    Attributes:
        argument: |s - L|, 0 for s where hidden.
        p: exact exp(s - L); p_error: of the fp32 value; p_slack: of the stored one, rounded into its format.
        ds: exact dS (softcap's derivative included), ds_size: |dS|; ds_error and ds_slack likewise.
            ds_given_p: ds_error without the rounding of P, where dS takes a rounded P.
        ds_plain, ds_plain_error: dS before softcap's derivative: the gradient of the bias.
        delta_error: (B, H, Nq, 1) error of rowsum(dO * O) - dLSE.
        p_limits, ds_limits: what P and dS are at most before they are rounded.
        relative: |log of computed p / exact p|; worst: the largest.
        row_error: (B, H, Nq, 1) the part of it that an eager softmax adds for the whole row.
        exp_error: log of 1 + the error of one exponential; flush: its limit.
        overflow_p, overflow_ds: boolean, pairs whose score, or whose dP or delta, may leave fp32's range;
            hidden pairs too, whose P is 0: 0 * inf is NaN. overflow_delta: (B, H, Nq, 1) delta alone.
            None: nowhere.
    """

    argument: Tensor
    p: Tensor
    p_error: Tensor
    p_slack: Tensor
    ds: Tensor
    ds_size: Tensor
    ds_error: Tensor
    ds_given_p: Tensor
    ds_slack: Tensor
    ds_plain: Tensor
    ds_plain_error: Tensor
    delta_error: Tensor
    p_limits: Limits
    ds_limits: Limits
    relative: Tensor
    worst: float
    row_error: Tensor | float
    exp_error: float
    flush: float
    overflow_p: Tensor | None
    overflow_ds: Tensor | None
    overflow_delta: Tensor | None


def pair_errors(
    problem: Problem,
    forward: ForwardQuantities,
    exact: BackwardQuantities,
    given: Given,
    score: ScoreError,
    arithmetic: Arithmetic,
    machine: Machine,
) -> PairErrors:
    """Terms [B1] to [B7] of THEORY.md section 4.1, 4.2 and 4.4."""
    eager = arithmetic.keeps_probabilities
    mask, p = score.visible, exact.probabilities
    finite = not p.numel() or math.isfinite(float(p.sum()))
    past: Tensor | None = None
    if not finite:
        seen = torch.isfinite(p) & forward.visible
        past = forward.visible & ~seen
        p, mask = torch.where(seen, p, 0.0), seen.double()
    stored = torch.where(torch.isfinite(given.lse), given.lse.double(), 0.0).unsqueeze(-1)
    scores = forward.scores
    if not scores.numel() or not math.isfinite(float(scores.sum())):
        scores = scores.nan_to_num(0.0, 0.0, 0.0)
    constant = 0.0 if score.additive else score.constant
    exponential = exponential_of(arithmetic.in_backward, machine)
    # [B1] No common shift cancels here: P is exp(s - L) with L given.
    argument = (scores - stored).abs_()
    shift = 2 * UNIT * stored.abs()
    row = shift * (1 + UNIT) + exponential.log_error
    if given.lse_error is not None:  # [B6] the stored log-sum-exp is off
        row = row + given.lse_error.nan_to_num(0.0, posinf=torch.inf).unsqueeze(-1) * (1 + 4 * UNIT)
    row_error: Tensor | float = 0.0
    if eager:  # P comes from the forward: its row sum errs as well
        own = score.own * (ORACLE_SHARE * (1 + UNIT))
        if constant:
            own.add_(scores.abs(), alpha=constant * (1 + UNIT))
        keys = own.shape[-1]
        row_error = own.amax(-1, keepdim=True) if keys else torch.zeros_like(stored)
        row_error = row_error + exponential.log_error
        row_error = row_error + (machine.vector.gamma(keys) + machine.division_error)
        relative = own.add_(row + row_error)
    else:
        relative = torch.add(row, score.own, alpha=ORACLE_SHARE * (1 + UNIT))
        if constant:
            relative.add_(scores.abs(), alpha=constant * (1 + UNIT))
    relative.add_(argument, alpha=UNIT)
    worst = float(relative.amax()) if relative.numel() else 0.0
    if worst <= LARGEST_LINEAR:
        p_error = (p * relative).mul_(1 + worst)
    else:
        log_p = scores - stored
        log_p = log_p if mask is None else torch.where(mask > 0, log_p, -torch.inf)
        relative = relative if mask is None else torch.where(mask > 0, relative, 0.0)
        p_error = weighted_growth(log_p, relative)
        # Elsewhere an error of exp(LARGEST_EXPONENT) is more than any exact value, and so says as much.
        beyond = (log_p > LARGEST_EXPONENT - 100.0) & (log_p + relative > LARGEST_EXPONENT)
        if bool(beyond.any()):
            past = beyond if past is None else past | beyond
    lost = flushed(machine)  # [B8]
    p_error = _floored(p_error, exponential.flush + (lost if eager else 0.0), mask)
    if past is not None:  # an exponent that errs by more than float64 can say: any P at all
        p_error = torch.where(past, torch.inf, p_error)
    p_most = p + p_error
    p_limits = Limits(p_most, arithmetic.probability_scale)
    p_rounding = p_limits.rounding(arithmetic.probability_format)  # [B2]
    # [B3] delta and dP
    dout = dout_of(problem)
    size_dout = dout.abs()
    unit = machine.accumulator(arithmetic.product_format or arithmetic.input_format)
    values = (problem.v.double() * problem.v_descale).abs()
    if not math.isfinite(float(values.sum())):
        values = values.nan_to_num(0.0, 0.0)
    magnitude = weighted(problem, size_dout, values.mT)
    largest = float(magnitude.amax()) if magnitude.numel() else 0.0
    size_out = given.out.double().nan_to_num(0.0).abs()
    if given.out_error is not None:
        size_out = size_out + given.out_error
    delta_size = (size_dout * size_out).nan_to_num_(0.0, posinf=torch.inf).sum(-1, keepdim=True)
    delta_error = machine.vector.gamma(problem.value_dim) * delta_size
    delta_error.add_(machine.vector.floor(problem.value_dim))
    if given.out_error is not None:  # [B7] the stored output is off
        delta_error = delta_error + (size_dout * given.out_error).nan_to_num(0.0, posinf=torch.inf).sum(
            -1, keepdim=True
        )
    if lost:
        operands = size_dout.sum(-1, keepdim=True) + size_out.nan_to_num(0.0, 0.0).sum(-1, keepdim=True)
        delta_error = delta_error + lost * (operands + 3)
    delta = exact.delta.unsqueeze(-1)
    delta_past: Tensor | None = None
    if arithmetic.delta_format is not None and not eager:
        products = (size_dout * size_out).nan_to_num_(0.0, posinf=torch.inf)
        delta_error, delta_past = _stored_delta(products, delta, delta_error, arithmetic.delta_format)
    if problem.dlse is not None:
        delta_error = delta_error + UNIT * (delta.abs() + delta_error)
    gamma = unit.gamma(problem.value_dim)
    if problem.v_descale != 1.0:
        gamma += 2 * UNIT
    if eager:  # eager backward: delta = rowsum(P * dP)
        delta_error = delta_error + _eager_delta_error(p_most, p_error, magnitude, gamma, machine)
        if lost:
            terms = magnitude.shape[-1]
            delta_error = delta_error + lost * (magnitude.sum(-1, keepdim=True) + 3 * terms)
        # A dP past the range makes delta infinite, or NaN where its P is 0.
        delta_size = torch.maximum(delta_size, magnitude.amax(-1, keepdim=True))
    difference = (exact.grad_probabilities - delta).abs_()
    if not finite or not math.isfinite(float(difference.sum())):
        difference = torch.where(forward.visible, difference, 0.0).nan_to_num_(0.0, 0.0)
    overflow_p, overflow_ds, overflow_delta = _overflow(score, forward, shift, magnitude, largest, delta_size)
    if delta_past is not None:
        overflow_delta = _either(delta_past, overflow_delta)
        overflow_ds = _either(delta_past.expand_as(p), overflow_ds)
    subnormal = subnormal_error(
        unit,
        operand(size_dout, dout_format(problem, arithmetic)),
        operand(values.mT, arithmetic.product_format or arithmetic.input_format, unit=problem.v_descale),
        partial(weighted, problem),
    )
    floor = unit.floor(problem.value_dim) * max(problem.v_descale, 1.0)
    floor += lost * (4 + problem.v_descale)
    dp_past: Tensor | None = None
    more: Tensor | None = subnormal if isinstance(subnormal, Tensor) else None
    if arithmetic.grad_probability_format is not None:
        dp_error = magnitude * gamma + (floor if more is None else more + floor)
        dp_rounding, dp_past = _dp_rounding(exact, dp_error, arithmetic.grad_probability_format)
        more = dp_rounding if more is None else more + dp_rounding
        if eager:
            delta_error = delta_error + (p_most * dp_rounding).sum(-1, keepdim=True)
    common = (delta_error + floor) * (1 + UNIT)
    difference_error = torch.add(common, magnitude, alpha=gamma * (1 + UNIT))
    if more is not None:
        difference_error.add_(more, alpha=1 + UNIT)
    difference_error.add_(difference, alpha=UNIT)
    # [B4] dS = P (dP - delta)
    ds = exact.grad_scores
    if not finite and mask is not None:
        ds = torch.where(mask > 0, ds, 0.0)
    rounded = arithmetic.grad_score_probability == "rounded"
    taken = p_rounding * (difference + difference_error) if rounded else None
    ds_size = ds.abs()
    ds_error = difference_error.mul_(p_most).addcmul_(p_error, difference)
    ds_error.mul_(1 + UNIT).add_(ds_size, alpha=UNIT)
    ds_error = _floored(ds_error, exponential.flush + 2 * lost, mask)
    if past is not None:
        ds_error = torch.where(past, torch.inf, ds_error)
    given_p = ds_error
    if taken is not None:
        ds_error = ds_error + taken * (1 + UNIT)
    ds_plain, plain_error = ds, ds_error
    if problem.softcap is not None:
        own = score.own * ORACLE_SHARE
        ds, ds_error = _through_softcap(problem, forward, ds_plain, plain_error, own, machine, mask)
        if taken is not None:
            own = score.own * ORACLE_SHARE  # the call before has used it up
            _, given_p = _through_softcap(problem, forward, ds_plain, given_p, own, machine, mask)
        if lost:
            capped = lost * (2 + ds_plain.abs()) * (1.0 if mask is None else mask)
            ds_error, given_p = ds_error + capped, given_p + capped
        if taken is None:
            given_p = ds_error
        ds_size = ds.abs()
        if (
            problem.softcap > 1.0
        ):  # the derivative of c tanh(x / c), taken from the left, multiplies by c first
            capped = forward.visible & ~((ds_plain.abs() + plain_error) * problem.softcap < _NEAR_MAX)
            overflow_ds = _either(capped, overflow_ds)
    overflow_ds = _either(overflow_ds, dp_past)
    if worst > LARGEST_LINEAR:  # P, or dS, may pass fp32's largest number by the errors of its exponent
        overflow_p = _either(overflow_p, forward.visible & ~(p_most < _NEAR_MAX))
        beyond = forward.visible & ~(ds_plain.abs() + plain_error < _NEAR_MAX)
        overflow_ds = _either(_either(overflow_ds, beyond), overflow_p)
    if eager and overflow_p is not None:  # such a row is NaN in all its columns, hidden ones too
        overflow_p = overflow_p.any(-1, keepdim=True).expand_as(p)
        overflow_ds = _either(overflow_ds, overflow_p)
    grad_format = arithmetic.grad_score_format or arithmetic.probability_format
    ds_limits = Limits(ds_size + ds_error)
    ds_rounding = ds_limits.rounding(grad_format)  # [B5]
    if arithmetic.scaled_grad_score_format is not None:
        size = ds_limits.plain + ds_rounding
        ds_rounding = ds_rounding + _scaled_rounding(problem, size, arithmetic.scaled_grad_score_format)
        if lost and (scale := abs(problem.effective_scale)):
            ds_rounding = ds_rounding + lost * (1 + 1 / scale) * (1.0 if mask is None else mask)
    return PairErrors(
        argument,
        p,
        p_error,
        p_rounding.add_(p_error),
        ds,
        ds_size,
        ds_error,
        given_p,
        ds_rounding.add_(ds_error),
        ds_plain,
        plain_error,
        delta_error,
        p_limits,
        ds_limits,
        relative,
        worst if worst >= 0 else float("inf"),
        row_error,
        exponential.log_error,
        exponential.flush,
        overflow_p,
        overflow_ds,
        overflow_delta,
    )


def _either(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    """Pairs of either; None: none."""
    if other is None or not bool(other.any()):
        return one
    return other if one is None else one | other


def _floored(error: Tensor, floor: float, mask: Tensor | None) -> Tensor:
    """error + floor where visible, 0 elsewhere."""
    if floor == 0.0 and (mask is None or math.isfinite(float(error.sum()))):
        return error  # P and dS are 0 where hidden
    if mask is None:
        return error.add_(floor)
    if not bool(torch.isfinite(error.sum())):
        return torch.where(mask > 0, error + floor, 0.0)
    return error.add_(mask, alpha=floor)


def _overflow(
    score: ScoreError,
    forward: ForwardQuantities,
    shift: Tensor,
    magnitude: Tensor,
    largest: float,
    delta_size: Tensor,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """overflow_p, overflow_ds and overflow_delta of ``PairErrors``; ``largest``: of ``magnitude``."""
    own = score.own
    limited = score.overflow is None and (not own.numel() or float(own.amax()) < torch.inf)
    overflow_p = None
    if not limited or bool((shift > 20.0).any()):
        rows = torch.zeros_like(shift, dtype=torch.bool)
        rows = rows if score.overflow is None else score.overflow.unsqueeze(-1)
        overflow_p = forward.visible & (rows | ~torch.isfinite(own) | (shift > 20.0))
    most_delta = float(delta_size.amax()) if delta_size.numel() else 0.0
    if largest + most_delta < _NEAR_MAX:
        return overflow_p, overflow_p, None
    past = magnitude + delta_size >= _NEAR_MAX
    return overflow_p, past if overflow_p is None else past | overflow_p, delta_size >= _NEAR_MAX


def _stored_delta(
    products: Tensor, delta: Tensor, error: Tensor, fmt: Format
) -> tuple[Tensor, Tensor | None]:
    """[B3] delta, off by ``error`` in fp32, of ``products`` |dO O| that are rounded into ``fmt``, and rounded
    itself; and the rows in which one of them may leave the range."""
    each = Limits(products).rounding(fmt)
    error = error + each.sum(-1, keepdim=True)
    whole = Limits(delta.abs().nan_to_num(0.0, posinf=torch.inf) + error).rounding(fmt)
    past = torch.isinf(error) | torch.isinf(whole)
    if bool(past.any()):
        return torch.where(past, 0.0, error + whole), past
    return error + whole, None


def _dp_rounding(exact: BackwardQuantities, error: Tensor, fmt: Format) -> tuple[Tensor, Tensor | None]:
    """[B3] dP (off by ``error``) in its format: the rounding, 0 where it may leave the range; and the rows
    in which some dP, hidden ones included, may: 0 * inf is NaN."""
    size = exact.grad_probabilities.abs().nan_to_num(0.0, posinf=torch.inf)
    rounding = Limits(size + error).rounding(fmt)
    past = torch.isinf(rounding)
    if not bool(past.any()):
        return rounding, None
    return torch.where(past, 0.0, rounding), past.any(-1, keepdim=True).expand_as(past)


def _scaled_rounding(problem: Problem, size: Tensor, fmt: Format) -> Tensor:
    """[B5] dS of at most ``size`` times the scale: the scale and the product in fp32, then ``fmt``; in units
    of dS."""
    scale = abs(problem.effective_scale)
    if not scale:
        return torch.zeros_like(size)
    return size * (2 * UNIT) + Limits(size * (scale * (1 + 2 * UNIT))).rounding(fmt) / scale


def _eager_delta_error(
    p: Tensor, p_error: Tensor, magnitude: Tensor, gamma: float, machine: Machine
) -> Tensor:
    """delta = sum_j P_ij dP_ij, ``p`` at its largest: errors of both factors, and the sum."""
    total = (p * magnitude).sum(-1, keepdim=True)
    moved = (p_error * magnitude).sum(-1, keepdim=True)
    return moved + (gamma + machine.vector.gamma(p.shape[-1])) * total + p.shape[-1] * SMALLEST_FP32


def _through_softcap(
    problem: Problem,
    forward: ForwardQuantities,
    ds: Tensor,
    error: Tensor,
    own: Tensor,
    machine: Machine,
    mask: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """dS times sech^2(x / c) = 1 - tanh^2: the derivative errs by 2 (tanh error + own/c) + 3 u."""
    cap = problem.softcap or 1.0
    x = (forward.products / cap).abs_().nan_to_num_(0.0, 0.0)
    slope = softcap_slope(problem, forward)
    if mask is not None and not bool(torch.isfinite(own.sum() + slope.sum())):
        slope, own = torch.where(mask > 0, slope, 0.0), torch.where(mask > 0, own, 0.0)
    slope_error = own.mul_(2 / cap).add_(x.clamp_(max=0.5), alpha=6 * UNIT)
    slope_error.add_(2 * machine.tanh_error + 3 * UNIT)
    through = ds * slope
    result = (ds.abs() * slope_error).addcmul_(error, slope.add_(slope_error))
    return through, result.mul_(1 + UNIT).add_(through.abs(), alpha=UNIT)
