"""Worst-case elementwise bounds for the recomputing backward: THEORY.md section 4 (tier A).

Conditional on the stored output and log-sum-exp: the backward is judged on what it was given.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from flashcheck.arithmetic import Arithmetic, Machine
from flashcheck.bounds import centred, rms_backward
from flashcheck.bounds.interval import Interval, rounded_interval
from flashcheck.bounds.numbers import FP32_MAX, SMALLEST_FP32, UNIT, is_power_of_two, weighted_growth
from flashcheck.bounds.pairs import PairErrors, dout_of, pair_errors, sum_group, tiles_of
from flashcheck.bounds.result import BackwardBound, TensorBound
from flashcheck.bounds.rms import after_rounding
from flashcheck.formats import Format, format_of, half_ulp
from flashcheck.oracle.quantities import BackwardQuantities, ForwardQuantities
from flashcheck.problem import Problem


def backward_bound(
    problem: Problem,
    forward: ForwardQuantities,
    exact: BackwardQuantities,
    out: Tensor,
    lse: Tensor,
    arithmetic: Arithmetic,
    machine: Machine,
) -> BackwardBound:
    """Bounds on the gradients that any recomputing backward with this arithmetic obeys.

    Args:
        forward: the oracle's forward quantities (scores, products, visible).
        exact: the oracle's gradients, conditional on ``out`` and ``lse``.
        out, lse: what the kernel was given, (B, H, Nq, dv) and (B, H, Nq).

    Source: THEORY.md section 4.
    """
    if not problem.num_keys or not problem.num_queries:
        return _nothing(exact, arithmetic.output_format)
    pairs = pair_errors(problem, forward, exact, out, lse, arithmetic, machine)
    q, k = problem.q.double(), problem.k.double().repeat_interleave(problem.group, 1)
    dout = dout_of(problem)
    operand = arithmetic.product_format or arithmetic.probability_format
    grad_format = arithmetic.grad_score_format or arithmetic.probability_format
    grad_operand = arithmetic.product_format or grad_format
    scale = abs(problem.effective_scale)
    ds_slack, p_slack = pairs.ds_error + pairs.ds_rounding, pairs.p_error + pairs.p_rounding
    v_unit = machine.accumulator(operand)
    s_unit = machine.accumulator(grad_operand)
    rows, keys = problem.num_queries * problem.group, problem.num_keys
    gamma_v, gamma_q, gamma_k = v_unit.gamma(rows), s_unit.gamma(keys), s_unit.gamma(rows)

    def summed(slack: Tensor, size: Tensor, other: Tensor, gamma: float) -> Tensor:
        """[G1] operand errors, [G2] accumulation."""
        return slack @ other + gamma * ((size + slack) @ other)

    dv = summed(p_slack.mT, pairs.p.mT, dout.abs(), gamma_v)
    dq = scale * (1 + 2 * UNIT) * summed(ds_slack, pairs.ds.abs(), k.abs(), gamma_q)
    dk = scale * (1 + 2 * UNIT) * summed(ds_slack.mT, pairs.ds.abs().mT, q.abs(), gamma_k)
    if not is_power_of_two(arithmetic.probability_scale):
        dv = dv * (1 + 2 * UNIT) + UNIT * (pairs.p.mT @ dout.abs())
    partial_q = scale * ((pairs.ds.abs() + ds_slack) @ k.abs())
    partial_k = scale * ((pairs.ds.abs() + ds_slack).mT @ q.abs())
    partial_v = (pairs.p + p_slack).mT @ dout.abs()
    if arithmetic.scale_placement == "operands":  # the products take q and k times sqrt(scale), rounded
        dq, dk = dq + 3 * UNIT * partial_q, dk + 3 * UNIT * partial_k
    dq = dq + _tile_rounding(partial_q, keys, arithmetic.block_keys, arithmetic)
    dk = dk + _tile_rounding(partial_k, problem.num_queries, arithmetic.block_queries, arithmetic)
    dv = dv + _tile_rounding(partial_v, problem.num_queries, arithmetic.block_queries, arithmetic)
    if arithmetic.group_grad_format is not None and problem.group > 1:  # [G4]
        dk = dk + half_ulp(partial_k, arithmetic.group_grad_format)
        dv = dv + half_ulp(partial_v, arithmetic.group_grad_format)
        if arithmetic.group_grad_format.precision <= 11:  # the sum over the group is stored so as well
            extra = problem.group * arithmetic.group_grad_format.unit_roundoff
            dk, dv = dk + extra * partial_k, dv + extra * partial_v
    # [G5] subnormal products and sums, before and after the scale.
    dq = dq + keys * SMALLEST_FP32 * (scale + 2)
    dk = dk + problem.num_queries * SMALLEST_FP32 * (scale + 2)
    dv = dv + problem.num_queries * SMALLEST_FP32
    overflow = _overflow(problem, pairs, arithmetic, partial_q, partial_k, partial_v)
    dk, dv = sum_group(dk, problem), sum_group(dv, problem) * problem.v_descale
    dq = dq + 2 * UNIT * exact.dq.abs()
    dk = dk + 2 * UNIT * exact.dk.abs()
    fmt = arithmetic.output_format
    sigma = rms_backward.backward_sigma(problem, forward, exact, lse, pairs, arithmetic, machine)
    linear = rms_backward.first_order(pairs, problem)
    centres = centred.gradient_intervals(problem, exact, pairs, arithmetic, machine, overflow)
    tensors = {}
    for name, value, error in (("dq", exact.dq, dq), ("dk", exact.dk, dk), ("dv", exact.dv, dv)):
        holds = (linear[name] & torch.isfinite(value)).expand_as(value)
        predicted = torch.where(holds, after_rounding(value, sigma[name], fmt), 0.0)
        tensors[name] = TensorBound(
            _interval(value, error, fmt, overflow[name]), predicted, holds, fmt.precision <= 11, centres[name]
        )
    if exact.dbias is not None and problem.bias is not None:
        tensors["dbias"] = _bias_bound(problem, exact.dbias, pairs, machine)
    if exact.dsink is not None and problem.sink is not None:
        tensors["dsink"] = _sink_bound(problem, exact, lse, pairs, machine)
    return BackwardBound(tensors)


def _tile_rounding(partial: Tensor, length: int, block: int | None, arithmetic: Arithmetic) -> Tensor:
    """[G3] Gradients that are kept in a narrow format while they are summed over tiles."""
    if arithmetic.grad_accumulator_format is None:
        return torch.zeros_like(partial)
    tiles = tiles_of(length, block)
    # Each store errs by half an ulp of a partial sum, which earlier stores may have enlarged.
    growth = (1 + arithmetic.grad_accumulator_format.unit_roundoff) ** tiles
    return tiles * half_ulp(partial * growth, arithmetic.grad_accumulator_format)


def _nothing(exact: BackwardQuantities, fmt: Format) -> BackwardBound:
    """No pair exists: every gradient is exactly 0."""
    named = {"dq": exact.dq, "dk": exact.dk, "dv": exact.dv, "dbias": exact.dbias, "dsink": exact.dsink}
    return BackwardBound(
        {
            name: _unpredicted(rounded_interval(x, torch.zeros_like(x), fmt))
            for name, x in named.items()
            if x is not None
        }
    )


def _overflow(
    problem: Problem,
    pairs: PairErrors,
    arithmetic: Arithmetic,
    partial_q: Tensor,
    partial_k: Tensor,
    partial_v: Tensor,
) -> dict[str, Tensor]:
    """Elements whose computation may leave the range of fp32, or of a format that partial sums
    are kept in, on the way; shapes of q, k, v."""
    kept, grouped_format = arithmetic.grad_accumulator_format, arithmetic.group_grad_format
    stores = (FP32_MAX, *(f.max_finite for f in (kept, grouped_format) if f is not None))
    limit = min(stores) * (1 - 2.0**-10)
    unscaled = max(abs(problem.effective_scale), 1e-300)

    def past(partial: Tensor, factor: float) -> Tensor:
        return ~(torch.maximum(partial, partial / factor) < limit)

    dq = pairs.overflow_ds.any(-1, keepdim=True) | past(partial_q, unscaled)
    dk = pairs.overflow_ds.any(-2).unsqueeze(-1) | past(partial_k, unscaled)
    dv = pairs.overflow_p.any(-2).unsqueeze(-1) | past(partial_v, 1.0)
    grouped = {"dk": sum_group(dk.double(), problem) > 0, "dv": sum_group(dv.double(), problem) > 0}
    return {"dq": dq, **grouped}


def _interval(exact: Tensor, error: Tensor, fmt: Format, overflow: Tensor | None = None) -> Interval:
    """Gradients whose exact value is not finite are unlimited here; the non-finite checks judge them."""
    finite = torch.isfinite(exact)
    error = torch.where(finite, error.nan_to_num(torch.inf, torch.inf), torch.inf)
    return rounded_interval(torch.where(finite, exact, 0.0), error, fmt, overflow)


def _unpredicted(interval: Interval) -> TensorBound:
    nothing = torch.zeros_like(interval.exact)
    return TensorBound(interval, nothing, nothing.bool(), prediction_gates=False)


def _bias_bound(problem: Problem, exact: Tensor, pairs: PairErrors, machine: Machine) -> TensorBound:
    """dbias sums dS over the dimensions along which the bias was broadcast."""
    assert problem.bias is not None
    dims = [d for d in range(4) if problem.bias.shape[d] == 1 and pairs.ds_plain.shape[d] != 1]
    size = pairs.ds_plain.abs() + pairs.ds_plain_error
    terms = math.prod(pairs.ds_plain.shape[d] for d in dims)
    error, total = pairs.ds_plain_error, size
    if dims:
        error, total = error.sum(dims, keepdim=True), total.sum(dims, keepdim=True)
    error = error + machine.vector.gamma(terms) * total
    overflow = pairs.overflow_ds
    for dim in dims:
        overflow = overflow.any(dim, keepdim=True)
    return _unpredicted(_interval(exact, error, format_of(problem.bias.dtype), overflow))


def _sink_bound(
    problem: Problem, exact: BackwardQuantities, lse: Tensor, pairs: PairErrors, machine: Machine
) -> TensorBound:
    """dsink = -sum_i p_sink,i delta_i, with p_sink = exp(sink - L)."""
    assert problem.sink is not None
    assert exact.dsink is not None
    sink = problem.sink.double().view(1, -1, 1)
    stored = torch.where(torch.isfinite(lse), lse.double(), 0.0)
    log_p = torch.where(torch.isfinite(lse), sink - stored, -torch.inf)
    relative = 2 * UNIT * (stored.abs() + sink.abs()) + UNIT * (sink - stored).abs() + 2 * machine.exp_error
    p_error = weighted_growth(log_p, relative) + machine.exp_flush
    delta, delta_error = exact.delta, pairs.delta_error.squeeze(-1)
    term = p_error * delta.abs() + (torch.exp(log_p) + p_error) * delta_error
    size = (torch.exp(log_p) + p_error) * (delta.abs() + delta_error)
    terms = size.shape[0] * size.shape[2]
    error = term.sum((0, 2)) + (machine.vector.gamma(terms) + 2 * UNIT) * size.sum((0, 2))
    overflow = pairs.overflow_delta.squeeze(-1).any(2).any(0) | ~(size.sum((0, 2)) < FP32_MAX)
    return _unpredicted(_interval(exact.dsink, error, format_of(problem.sink.dtype), overflow))
