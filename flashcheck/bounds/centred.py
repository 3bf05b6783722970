"""Centred bounds (tier C): the roundings of P and dS are predicted, not bounded. THEORY.md section 6.

The reference says which value of the narrow format each probability rounds to, except where it lies so
close to a rounding boundary that the fp32 errors decide. What is left uncertain is of fp32 size, so the
interval often holds a single 16-bit number. A value inside the worst-case bound (tier A) and outside
this one was not computed by the algorithm that was declared.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flashcheck.arithmetic import Arithmetic, Machine
from flashcheck.bounds.interval import Interval, rounded_interval
from flashcheck.bounds.numbers import SMALLEST_FP32, UNIT, exp_clipped, expm1_clipped, is_power_of_two
from flashcheck.bounds.pairs import PairErrors, dout_of, sum_group, tiles_of
from flashcheck.bounds.rows import SoftmaxRows
from flashcheck.bounds.weights import WeightErrors
from flashcheck.formats import half_ulp, round_nearest
from flashcheck.oracle.quantities import BackwardQuantities
from flashcheck.problem import Problem

_LIMIT = 50.0  # e^50 is "anything" here


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
    rows: SoftmaxRows,
    weights: WeightErrors,
    arithmetic: Arithmetic,
    machine: Machine,
    overflow: Tensor,
) -> Interval:
    """Centred interval for out (B, H, Nq, dv): terms [C1] to [C3]."""
    fmt, factor = arithmetic.probability_format, arithmetic.probability_scale
    assert weights.running_max is not None
    running = weights.running_max
    weight = torch.where(rows.visible, torch.exp(rows.scores - running), 0.0)
    local = weights.local.clamp(max=_LIMIT)
    stored = round_nearest(factor * weight, fmt) / factor
    high = round_nearest(factor * weight * torch.exp(local), fmt)
    low = round_nearest(factor * weight * torch.exp(-local), fmt)
    ambiguous = (high - low) / factor  # [C1]: 0 for almost all weights
    if fmt.precision >= 24:
        ambiguous = weight * (torch.exp(local) - torch.exp(-local))
    share = torch.where(rows.visible, torch.exp(running - rows.row_max) / rows.row_sum, 0.0)
    numerator = stored * share
    rescaled = running < rows.row_max
    chain = torch.where(rescaled, weights.chain + 2 * weights.own_max, 0.0)
    if arithmetic.scale_placement == "exponent_fma":
        size = running.abs() + rows.row_max.abs() + 2 * weights.own_max
        chain = chain + torch.where(rescaled, UNIT * size, 0.0)
    chain = (chain + weights.exp_error * weights.rescales).clamp(max=_LIMIT)
    slack = numerator * expm1_clipped(chain) + ambiguous * share * exp_clipped(chain)  # [C2]
    slack = slack + stored * weights.flush / rows.row_sum
    limit = weights.flush / (1 + weights.rescales)
    slack = slack + weight.clamp(max=limit) * share  # a weight under the flush limit may be 0
    num_keys = rows.values.shape[-2]
    kernel = weights.kernel.clamp(max=_LIMIT)
    more = (rows.p * torch.expm1(kernel)).sum(-1, keepdim=True)
    less = -(rows.p * torch.expm1(-kernel)).sum(-1, keepdim=True)
    sums = machine.vector.gamma(num_keys) + weights.rescales * UNIT
    least = ((1 - less) * (1 - min(sums, 0.5))).clamp(min=1e-300)
    quotient = torch.maximum(
        (1 + machine.division_error) / least - 1,
        1 - (1 - machine.division_error) / ((1 + more) * (1 + sums)),
    )  # [C3]
    unit = machine.accumulator(arithmetic.product_format or fmt)
    size = rows.values.abs()
    gamma = unit.gamma(num_keys) + weights.rescales * UNIT
    error = slack @ size + gamma * ((numerator + slack) @ size)
    error = error + num_keys * SMALLEST_FP32 / (factor * weights.denominator)
    centre = numerator @ rows.values
    error = error * (1 + quotient) + quotient * centre.abs()
    error = torch.where(rows.live, error.nan_to_num(torch.inf, torch.inf), torch.inf)
    return rounded_interval(torch.where(rows.live, centre, 0.0), error, arithmetic.output_format, overflow)


def gradient_intervals(
    problem: Problem,
    exact: BackwardQuantities,
    pairs: PairErrors,
    arithmetic: Arithmetic,
    machine: Machine,
    overflow: dict[str, Tensor],
) -> dict[str, Interval]:
    """Centred intervals for dq, dk, dv; they need no tiling, since P is recomputed from the stored LSE.

    Gradients whose exact value is not finite (a stored LSE too coarse for its scores) are unlimited.
    """
    p_format, factor = arithmetic.probability_format, arithmetic.probability_scale
    ds_format = arithmetic.grad_score_format or p_format
    scale = problem.effective_scale
    stored_p = round_nearest(factor * pairs.p, p_format) / factor
    high = round_nearest(factor * (pairs.p + pairs.p_error), p_format)
    low = round_nearest(factor * (pairs.p - pairs.p_error).clamp(min=0.0), p_format)
    slack_p = (high - low) / factor
    stored_ds = round_nearest(pairs.ds, ds_format)
    slack_ds = round_nearest(pairs.ds + pairs.ds_error, ds_format) - round_nearest(
        pairs.ds - pairs.ds_error, ds_format
    )
    if p_format.precision >= 24:
        slack_p = 2 * pairs.p_error
    if ds_format.precision >= 24:
        slack_ds = 2 * pairs.ds_error
    q, k, dout = problem.q.double(), problem.k.double().repeat_interleave(problem.group, 1), dout_of(problem)
    p_unit = machine.accumulator(arithmetic.product_format or p_format)
    ds_unit = machine.accumulator(arithmetic.product_format or ds_format)
    rows, keys = problem.num_queries * problem.group, problem.num_keys

    def interval(
        name: str,
        weights: Tensor,
        slack: Tensor,
        other: Tensor,
        gamma: float,
        factor: float,
        tiles: int,
    ) -> Interval:
        grouped = name != "dq"
        centre = factor * (weights @ other)
        size = (weights.abs() + slack) @ other.abs()
        error = abs(factor) * (1 + 2 * UNIT) * (slack @ other.abs() + gamma * size)
        error = error + max(rows, keys) * SMALLEST_FP32 * (abs(factor) + 2)
        kept = arithmetic.grad_accumulator_format
        if kept is not None:
            error = error + tiles * half_ulp(abs(factor) * size * (1 + kept.unit_roundoff) ** tiles, kept)
        if grouped and arithmetic.group_grad_format is not None and problem.group > 1:
            narrow = arithmetic.group_grad_format
            error = error + half_ulp(abs(factor) * size, narrow)
            error = error + problem.group * narrow.unit_roundoff * abs(factor) * size
        if grouped:
            centre, error = sum_group(centre, problem), sum_group(error, problem)
        error = (error + 2 * UNIT * centre.abs()).nan_to_num(torch.inf, torch.inf)
        defined = torch.isfinite(getattr(exact, name)) & torch.isfinite(centre)
        error = torch.where(defined, error, torch.inf)
        centre = torch.where(defined, centre, 0.0)
        return rounded_interval(centre, error, arithmetic.output_format, overflow[name])

    q_tiles = tiles_of(keys, arithmetic.block_keys)
    k_tiles = tiles_of(problem.num_queries, arithmetic.block_queries)
    gamma_rows, gamma_keys = ds_unit.gamma(rows), ds_unit.gamma(keys)
    return {
        "dq": interval("dq", stored_ds, slack_ds, k, gamma_keys, scale, q_tiles),
        "dk": interval("dk", stored_ds.mT, slack_ds.mT, q, gamma_rows, scale, k_tiles),
        "dv": interval("dv", stored_p.mT, slack_p.mT, dout, p_unit.gamma(rows), 1.0, k_tiles),
    }
