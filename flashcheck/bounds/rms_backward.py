"""Predicted rms error per element of the gradients: THEORY.md section 5."""

from __future__ import annotations

import torch
from torch import Tensor

from flashcheck.arithmetic import Arithmetic, Machine
from flashcheck.bounds.numbers import UNIT
from flashcheck.bounds.pairs import PairErrors, dout_of, sum_group, tiles_of
from flashcheck.bounds.rms import (
    LARGEST_LINEAR,
    ROUNDING_RMS,
    accumulation_variance,
    partial_squares,
    score_variance,
)
from flashcheck.formats import Format, half_ulp
from flashcheck.oracle.quantities import BackwardQuantities, ForwardQuantities
from flashcheck.problem import Problem


def backward_sigma(
    problem: Problem,
    forward: ForwardQuantities,
    exact: BackwardQuantities,
    lse: Tensor,
    pairs: PairErrors,
    arithmetic: Arithmetic,
    machine: Machine,
) -> dict[str, Tensor]:
    """Standard deviations of dq, dk, dv before they are rounded; shapes of q, k, v."""
    visible = forward.visible
    q2 = problem.q.double().square()
    k2 = problem.k.double().square().repeat_interleave(problem.group, 1)
    v2 = problem.v.double().square().repeat_interleave(problem.group, 1) * problem.v_descale**2
    dout2 = dout_of(problem).square()
    scores = torch.where(visible, forward.scores, 0.0)
    stored = torch.where(torch.isfinite(lse), lse.double(), 0.0).unsqueeze(-1)
    log_p = score_variance(problem, visible, scores, arithmetic, machine)
    log_p = log_p + (ROUNDING_RMS * UNIT) ** 2 * ((scores - stored).square() + 2 * stored.square())
    log_p = log_p + (pairs.exp_error / 1.73) ** 2
    p, ds = pairs.p, pairs.ds
    p_variance = _rounding(p, arithmetic.probability_format, arithmetic.probability_scale)
    p_variance = p_variance + p.square() * log_p
    unit = machine.accumulator(arithmetic.product_format or arithmetic.input_format)
    dp = torch.where(visible, exact.grad_probabilities, 0.0)
    dp_variance = accumulation_variance(unit, problem.value_dim, dp, dout2 @ v2.mT)
    ds_variance = _rounding(ds, arithmetic.grad_score_format or arithmetic.probability_format, 1.0)
    ds_variance = ds_variance + ds.square() * log_p + p.square() * dp_variance
    ds_variance = ds_variance + (UNIT * ds).square() / 3
    p_variance = torch.where(visible, p_variance, 0.0)
    ds_variance = torch.where(visible, ds_variance, 0.0)
    grad_operand = arithmetic.product_format or arithmetic.grad_score_format or arithmetic.probability_format
    s_unit = machine.accumulator(grad_operand)
    p_unit = machine.accumulator(arithmetic.product_format or arithmetic.probability_format)
    scale2 = problem.effective_scale**2
    rows, keys = problem.num_queries * problem.group, problem.num_keys
    squares = {
        "dq": scale2 * (ds.square() @ k2),
        "dk": sum_group(scale2 * (ds.square().mT @ q2), problem),
        "dv": sum_group(p.square().mT @ dout2, problem),
    }
    variance = {
        "dq": scale2 * (ds_variance @ k2) + accumulation_variance(s_unit, keys, exact.dq, squares["dq"]),
        "dk": sum_group(scale2 * (ds_variance.mT @ q2), problem)
        + accumulation_variance(s_unit, rows, exact.dk, squares["dk"]),
        "dv": sum_group(p_variance.mT @ dout2, problem)
        + accumulation_variance(p_unit, rows, exact.dv, squares["dv"]),
    }
    kept = arithmetic.grad_accumulator_format
    if kept is not None:  # every tile's sum is stored: as many roundings of partial sums as tiles
        for name, tiles in (
            ("dq", tiles_of(keys, arithmetic.block_keys)),
            ("dk", tiles_of(problem.num_queries, arithmetic.block_queries) * problem.group),
            ("dv", tiles_of(problem.num_queries, arithmetic.block_queries) * problem.group),
        ):
            gradient = getattr(exact, name)
            # The last store is the output's own rounding, which is counted there.
            partial = partial_squares(tiles, gradient, squares[name]) - gradient.square()
            variance[name] = variance[name] + (ROUNDING_RMS * kept.unit_roundoff) ** 2 * partial
    return {name: value.sqrt() for name, value in variance.items()}


def first_order(pairs: PairErrors, problem: Problem) -> dict[str, Tensor]:
    """Where the prediction holds: rows for dq, keys for dk and dv; broadcast over the head dim."""
    size = pairs.ds.abs()
    row = torch.maximum(pairs.p, size / size.amax(-1, keepdim=True).clamp(min=1e-300)) > 1e-9
    column = torch.maximum(pairs.p, size / size.amax(-2, keepdim=True).clamp(min=1e-300)) > 1e-9
    bad = pairs.relative >= LARGEST_LINEAR
    rows = ~(row & bad).any(-1, keepdim=True)
    keys = ~(column & bad).any(-2).unsqueeze(-1)
    keys = sum_group((~keys).double(), problem) == 0
    return {"dq": rows, "dk": keys, "dv": keys}


def _rounding(x: Tensor, fmt: Format, factor: float) -> Tensor:
    """Variance of rounding a known operand to nearest."""
    if fmt.precision >= 24:
        return torch.zeros_like(x)
    return torch.minimum(x.square(), (half_ulp(factor * x, fmt) / factor).square() / 3)
