"""Worst-case elementwise bounds for the recomputing backward: THEORY.md section 4 (tier A).

Conditional on the stored output and log-sum-exp: the backward is judged on what it was given.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from flashcheck.arithmetic import Arithmetic, Machine
from flashcheck.bounds.interval import rounded_interval
from flashcheck.bounds.numbers import ORACLE_SHARE, SMALLEST_FP32, UNIT, is_power_of_two, weighted_growth
from flashcheck.bounds.result import BackwardBound, TensorBound
from flashcheck.bounds.scores import score_error
from flashcheck.bounds.tiling import SMALLEST_TILE
from flashcheck.formats import Format, format_of, half_ulp
from flashcheck.oracle.quantities import BackwardQuantities, ForwardQuantities
from flashcheck.problem import Problem


@dataclass(frozen=True, slots=True)
class PairErrors:
    """Errors of the recomputed tiles, (B, H, Nq, Nk), 0 where hidden; ``p`` and ``ds`` are exact.

    Attributes:
        p: exact exp(s - L); p_error: of the fp32 value; p_rounding: of putting it into its format.
        ds: exact dS (softcap's derivative included); ds_error and ds_rounding likewise.
        ds_plain, ds_plain_error: dS before softcap's derivative: the gradient of the bias.
        delta_error: (B, H, Nq, 1) error of rowsum(dO * O) - dLSE.
        relative: |log of computed p / exact p|.
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
    pairs = pair_errors(problem, forward, exact, out, lse, arithmetic, machine)
    q, k = problem.q.double(), problem.k.double().repeat_interleave(problem.group, 1)
    dout = _dout(problem)
    operand = arithmetic.product_format or arithmetic.probability_format
    grad_format = arithmetic.grad_score_format or arithmetic.probability_format
    grad_operand = arithmetic.product_format or grad_format
    scale = abs(problem.effective_scale)
    ds_slack, p_slack = pairs.ds_error + pairs.ds_rounding, pairs.p_error + pairs.p_rounding
    v_unit = machine.accumulator(operand)
    s_unit = machine.accumulator(grad_operand)
    rows, keys = problem.num_queries * problem.group, problem.num_keys
    gamma_v, gamma_q, gamma_k = v_unit.gamma(rows), s_unit.gamma(keys), s_unit.gamma(rows)

    def summed(slack: Tensor, size: Tensor, other: Tensor, gamma: float, terms: int) -> Tensor:
        """[G1] operand errors, [G2] accumulation, and the floor of fp32."""
        return slack @ other + gamma * ((size + slack) @ other) + terms * SMALLEST_FP32

    dv = summed(p_slack.mT, pairs.p.mT, dout.abs(), gamma_v, rows)
    dq = scale * (1 + 2 * UNIT) * summed(ds_slack, pairs.ds.abs(), k.abs(), gamma_q, keys)
    dk = scale * (1 + 2 * UNIT) * summed(ds_slack.mT, pairs.ds.abs().mT, q.abs(), gamma_k, rows)
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
    dk, dv = _sum_group(dk, problem), _sum_group(dv, problem) * problem.v_descale
    dq = dq + 2 * UNIT * exact.dq.abs()
    dk = dk + 2 * UNIT * exact.dk.abs()
    fmt = arithmetic.output_format
    tensors = {
        "dq": _tensor_bound(exact.dq, dq, fmt),
        "dk": _tensor_bound(exact.dk, dk, fmt),
        "dv": _tensor_bound(exact.dv, dv, fmt),
    }
    if exact.dbias is not None and problem.bias is not None:
        tensors["dbias"] = _bias_bound(problem, exact.dbias, pairs, machine)
    if exact.dsink is not None and problem.sink is not None:
        tensors["dsink"] = _sink_bound(problem, exact, lse, pairs, machine)
    return BackwardBound(tensors)


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
    p_error = torch.where(visible, weighted_growth(log_p, relative) + machine.exp_flush, 0.0)
    p_rounding = _rounding(p + p_error, arithmetic.probability_format, arithmetic.probability_scale)  # [B2]
    # [B3] delta and dP
    dout = _dout(problem)
    unit = machine.accumulator(arithmetic.product_format or arithmetic.input_format)
    values = problem.v.double().repeat_interleave(problem.group, 1) * problem.v_descale
    magnitude = torch.where(visible, dout.abs() @ values.abs().mT, 0.0)
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
    plain_error = plain_error + UNIT * (ds_plain.abs() + plain_error) + machine.exp_flush
    plain_error = torch.where(visible, plain_error, 0.0)
    ds, ds_error = ds_plain, plain_error
    if problem.softcap is not None:
        ds, ds_error = _through_softcap(problem, forward, ds_plain, plain_error, own, machine, visible)
    grad_format = arithmetic.grad_score_format or arithmetic.probability_format
    ds_rounding = _rounding(ds.abs() + ds_error, grad_format, 1.0)  # [B5]
    return PairErrors(
        p, p_error, p_rounding, ds, ds_error, ds_rounding, ds_plain, plain_error, delta_error, relative
    )


def _dout(problem: Problem) -> Tensor:
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


def _tile_rounding(partial: Tensor, length: int, block: int | None, arithmetic: Arithmetic) -> Tensor:
    """[G3] Gradients that are kept in a narrow format while they are summed over tiles."""
    if arithmetic.grad_accumulator_format is None:
        return torch.zeros_like(partial)
    tiles = max(-(-length // (block or SMALLEST_TILE)), 1)
    # Each store errs by half an ulp of a partial sum, which earlier stores may have enlarged.
    growth = (1 + arithmetic.grad_accumulator_format.unit_roundoff) ** tiles
    return tiles * half_ulp(partial * growth, arithmetic.grad_accumulator_format)


def _sum_group(x: Tensor, problem: Problem) -> Tensor:
    """(B, H, ...) summed over the query heads of each group: (B, Hkv, ...)."""
    if problem.group == 1:
        return x
    return x.view(x.shape[0], problem.num_kv_heads, problem.group, *x.shape[2:]).sum(2)


def _tensor_bound(exact: Tensor, error: Tensor, fmt: Format) -> TensorBound:
    finite = torch.isfinite(exact)
    error = torch.where(finite, error.nan_to_num(torch.inf, torch.inf), torch.inf)
    interval = rounded_interval(torch.where(finite, exact, 0.0), error, fmt)
    nothing = torch.zeros_like(exact)
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
    return _tensor_bound(exact, error, format_of(problem.bias.dtype))


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
    return _tensor_bound(exact.dsink, error, format_of(problem.sink.dtype))
