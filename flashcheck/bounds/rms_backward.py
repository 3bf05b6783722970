"""Predicted rms error per element of the gradients: THEORY.md section 5."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from flashcheck.arithmetic import Arithmetic, Machine
from flashcheck.bounds.accumulation import (
    ROUNDING_RMS,
    accumulation_variance,
    accumulation_weights,
    partial_squares,
)
from flashcheck.bounds.gradient_sums import GradientSum, dout_of, sum_group
from flashcheck.bounds.numbers import LARGEST_LINEAR, UNIT
from flashcheck.bounds.pairs import Given, PairErrors
from flashcheck.bounds.score_noise import ScoreNoise, softcap_slope
from flashcheck.bounds.truncation import DotProducts
from flashcheck.formats import Format, half_ulp, round_nearest
from flashcheck.oracle.quantities import BackwardQuantities, ForwardQuantities
from flashcheck.problem import Problem


def backward_variance(
    problem: Problem,
    forward: ForwardQuantities,
    exact: BackwardQuantities,
    given: Given,
    pairs: PairErrors,
    stored: dict[str, Tensor],
    sums: dict[str, GradientSum],
    noise: ScoreNoise,
    machine: Machine,
) -> dict[str, Tensor]:
    """Variances of dq, dk, dv before they are rounded; shapes of q, k, v.

    Args:
        given: the output and log-sum-exp that the kernel reads.
        stored: the gradients of P and dS as they are predicted to be stored.
    """
    arithmetic = sums["dq"].arithmetic
    reference = torch.where(torch.isfinite(given.lse), given.lse.double(), 0.0).unsqueeze(-1)
    log_p = torch.addcmul(noise.variance, pairs.argument, pairs.argument, value=(ROUNDING_RMS * UNIT) ** 2)
    log_p.add_(2 * (ROUNDING_RMS * UNIT * reference).square() + (pairs.exp_error / 1.73) ** 2)
    p, ds = pairs.p, pairs.ds
    p_square, ds_square = p.square(), ds.square()
    # dS errs as P does, as dP does, and by its own two roundings.
    products = grad_products(problem, exact, arithmetic, machine)
    dp = products.variance().mul_(problem.v_descale**2)
    stored_delta = arithmetic.delta_format if not arithmetic.keeps_probabilities else None
    dp.add_(delta_variance(problem, forward, exact, machine, replace(arithmetic, delta_format=None)))
    drift = products.bias()
    drift = None if drift is None else drift.mul_(p).mul_(problem.v_descale)
    if stored_delta is not None:
        moved = delta_shift(problem, given, stored_delta) * p
        drift = -moved if drift is None else drift.sub_(moved)
    if arithmetic.grad_probability_format is not None:
        dp.add_(_dp_rounding(exact.grad_probabilities, p, p_square, arithmetic))
    ds_variance = dp.mul_(p_square)
    if problem.softcap is not None:
        slope, tanh = softcap_slope(problem, forward), torch.tanh(forward.products / problem.softcap)
        ds_variance.mul_(slope.square().add_(_slope_variance(tanh, machine)))
        drift = None if drift is None else drift.mul_(slope)
    ds_variance.addcmul_(ds_square, log_p)
    own = UNIT**2 / 3  # of dS, relative
    if problem.softcap is not None:
        ds_variance.add_(ds_square, alpha=own)
        own = 0.0
        ds_variance.add_(_tanh_twice(problem.softcap, tanh, pairs, slope, machine)).clamp_(min=0.0)
    p_variance = log_p.mul_(p_square)
    # Truncated scores move P, and dS with it, in one direction.
    lean = noise.bias
    if lean is not None and drift is not None:
        drift.addcmul_(lean, ds)
    # The roundings of P and dS are known, sign included: rows of nearly equal P share one error, which adds
    # up over the rows as independent errors do not.
    grad_format = arithmetic.grad_score_format or arithmetic.probability_format
    taken = arithmetic.probability_format if arithmetic.grad_score_probability == "rounded" else grad_format
    ds_rounded = min(f.precision for f in (arithmetic.grad_operand_format, grad_format, taken)) < 24
    p_rounded = arithmetic.probability_format.precision < 24
    p_drift = None if lean is None else lean * p
    kept = arithmetic.grad_accumulator_format
    result: dict[str, Tensor] = {}
    added = {"dv": 0.0, "ds": -own}  # shares of the squares that the variances hold already
    for name, total in sums.items():
        operand = "dv" if name == "dv" else "ds"
        variance, square = (p_variance, p_square) if name == "dv" else (ds_variance, ds_square)
        ends, bridge = accumulation_weights(total.unit, total.terms)
        gradient = getattr(exact, name)
        if bridge != added[operand]:
            variance.add_(square, alpha=bridge - added[operand])
            added[operand] = bridge
        found = total.apply(variance, total.square)
        found.mul_(total.factor**2).addcmul_(gradient, gradient, value=ends)
        rounded, biased = (p_rounded, p_drift) if name == "dv" else (ds_rounded, drift)
        shift = stored[name] - gradient if rounded else None
        if biased is not None:
            moved = total.apply(biased, total.other).mul_(total.factor)
            shift = moved if shift is None else shift.add_(moved)
        if shift is not None:
            found.addcmul_(shift, shift)
        if kept is not None:  # every tile's sum is stored: as many roundings of partial sums as tiles
            tiles = total.tiles * (1 if total.over_keys else problem.group)
            squares = total.apply(square, total.square).mul_(total.factor**2)
            # The last store is the output's own rounding, which is counted there.
            partial = partial_squares(tiles, gradient, squares) - gradient.square()
            found.add_(partial, alpha=(ROUNDING_RMS * kept.unit_roundoff) ** 2)
        elif total.group_format is not None:  # every head's gradient is stored before the group's sum
            heads = total.apply(p if name == "dv" else ds, total.other, per_head=True).mul_(total.factor)
            found.add_(sum_group(half_ulp(heads, total.group_format).square_().div_(3), problem))
        result[name] = found.nan_to_num_(0.0)
    return result


def _dp_rounding(dp: Tensor, p: Tensor, p_square: Tensor, arithmetic: Arithmetic) -> Tensor:
    """Variance of dP_ij - sum_k p_ik dP_ik by the rounding of dP, the sum over k where delta is taken so."""
    assert arithmetic.grad_probability_format is not None
    rounding = half_ulp(dp.nan_to_num(0.0, 0.0, 0.0), arithmetic.grad_probability_format).square_().div_(3)
    if not arithmetic.keeps_probabilities:
        return rounding
    return rounding * (1 - 2 * p).clamp_(min=0.0) + (p_square * rounding).sum(-1, keepdim=True)


def delta_shift(problem: Problem, given: Given, fmt: Format) -> Tensor:
    """How far a delta lies from its value whose products and sum are rounded into ``fmt``: (B, H, Nq, 1)."""
    products = (dout_of(problem) * given.out.double()).nan_to_num_(0.0, 0.0, 0.0)
    stored = round_nearest(round_nearest(products, fmt).sum(-1), fmt)
    return stored.sub_(products.sum(-1)).nan_to_num_(0.0, 0.0, 0.0).unsqueeze(-1)


def delta_variance(
    problem: Problem,
    forward: ForwardQuantities,
    exact: BackwardQuantities,
    machine: Machine,
    arithmetic: Arithmetic,
) -> Tensor:
    """Variance of the sum delta, (B, H, Nq, 1): what is left where dP - delta cancels."""
    products = dout_of(problem) * forward.out.nan_to_num(0.0, 0.0, 0.0)
    delta = exact.delta.nan_to_num(0.0, 0.0, 0.0)
    fmt = arithmetic.delta_format
    stored = 0.0 if fmt is None else half_ulp(products, fmt).square_().sum(-1).add_(half_ulp(delta, fmt) ** 2)
    squares = products.square_().sum(-1)
    variance = accumulation_variance(machine.vector, problem.value_dim, delta, squares)
    return (variance + stored / 3).unsqueeze(-1)


def grad_products(
    problem: Problem, exact: BackwardQuantities, arithmetic: Arithmetic, machine: Machine
) -> DotProducts:
    """dO V^T of the stored values, without the descale of V."""
    fmt = arithmetic.product_format or arithmetic.input_format
    dout, values = dout_of(problem), problem.v.double().mT
    total = exact.grad_probabilities
    if not math.isfinite(float(total.sum())):
        total = total.nan_to_num(0.0, 0.0, 0.0)
    total = total if problem.v_descale == 1.0 else total / problem.v_descale
    return DotProducts(problem, machine.accumulator(fmt), dout, values, total)


def _tanh_twice(cap: float, tanh: Tensor, pairs: PairErrors, slope: Tensor, machine: Machine) -> Tensor:
    """What the variance of dS gains because one error of tanh enters twice: c err in the score, already
    counted, and -2 tanh err in the cap's derivative. The two partly cancel."""
    through = slope * cap
    both = (through - 2 * tanh).square_().sub_(through.square_())
    return both.mul_(pairs.ds_plain.square()).mul_(machine.tanh_error**2 / 3)


def _slope_variance(tanh: Tensor, machine: Machine) -> Tensor:
    """Of the computed 1 - tanh^2 by the errors of tanh and of its square: all there is of it where the cap is
    saturated, so that errors of dP - delta meet this and not the derivative itself."""
    return tanh.square().mul_(4 * machine.tanh_error**2 / 3).add_((ROUNDING_RMS * UNIT) ** 2)


def first_order(pairs: PairErrors, problem: Problem) -> dict[str, Tensor]:
    """Where the prediction holds: rows for dq, keys for dk and dv; broadcast over the head dim."""
    if pairs.worst <= LARGEST_LINEAR:
        everywhere = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=pairs.p.device)
        return dict.fromkeys(("dq", "dk", "dv"), everywhere)
    size = pairs.ds_size
    row = torch.maximum(pairs.p, size / size.amax(-1, keepdim=True).clamp(min=1e-300)) > 1e-9
    column = torch.maximum(pairs.p, size / size.amax(-2, keepdim=True).clamp(min=1e-300)) > 1e-9
    bad = pairs.relative >= LARGEST_LINEAR
    rows = ~(row & bad).any(-1, keepdim=True)
    keys = ~(column & bad).any(-2).unsqueeze(-1)
    keys = sum_group((~keys).double(), problem) == 0
    return {"dq": rows, "dk": keys, "dv": keys}
