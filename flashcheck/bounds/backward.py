"""Worst-case elementwise bounds for the recomputing backward: THEORY.md section 4 (tier A).

Conditional on the stored output and log-sum-exp: the backward is judged on what it was given. With errors
of those two as well (``Given``) the same terms bound the distance from the exact gradients, end to end.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cache, partial
from typing import TypeVar

import torch
from torch import Tensor

from flashcheck.arithmetic import Arithmetic, Machine
from flashcheck.bounds import centred, rms_backward
from flashcheck.bounds.gradient_sums import GradientSum, Weights, gradient_sums, sum_group
from flashcheck.bounds.interval import Interval, apart, pieces, rounded_interval
from flashcheck.bounds.numbers import FEW, FP32_MAX, UNIT, flushed, weighted_growth
from flashcheck.bounds.pairs import Given, PairErrors, pair_errors
from flashcheck.bounds.result import BackwardBound, Prediction, TensorBound, unpredicted
from flashcheck.bounds.rms import after_rounding
from flashcheck.bounds.scale_gradient import scale_interval, scale_prediction
from flashcheck.bounds.scores import ScoreError, score_error
from flashcheck.bounds.side_gradients import SideGradients
from flashcheck.formats import Format, format_of
from flashcheck.oracle.quantities import BackwardQuantities, ForwardQuantities
from flashcheck.problem import Problem

T = TypeVar("T")


def backward_bound(
    problem: Problem,
    forward: ForwardQuantities,
    exact: BackwardQuantities,
    given: Given,
    arithmetic: Arithmetic,
    machine: Machine,
    scores: ScoreError | None = None,
    *,
    with_scale: bool = False,
) -> BackwardBound:
    """Bounds on the gradients that any recomputing backward with this arithmetic obeys.

    Args:
        forward: the oracle's forward quantities (scores, products, visible).
        exact: the oracle's gradients; conditional on ``given`` where that has no errors, else from scratch.
        given: the output and log-sum-exp that the kernel was given. With errors the centred intervals and
            predictions are left out: they hold for known stored values.
        scores: the scores' errors, where the forward's bound has them already.
        with_scale: bound dscale too.

    Source: THEORY.md section 4.
    """
    if not problem.num_keys or not problem.num_queries:
        return _nothing(exact, arithmetic.output_format, with_scale=with_scale)
    machine = arithmetic.on(machine)
    scores = score_error(problem, forward, arithmetic, machine) if scores is None else scores
    pairs = pair_errors(problem, forward, exact, given, scores, arithmetic, machine)
    sums = gradient_sums(problem, arithmetic, machine)
    p_limit = pairs.p_limits.with_rounding(arithmetic.probability_format)
    ds_format = arithmetic.grad_score_format or arithmetic.probability_format
    ds_limit = pairs.ds_limits.with_rounding(ds_format)
    if arithmetic.scaled_grad_score_format is not None:
        ds_limit = None
    p_weights = Weights(pairs.p, pairs.p_slack, p_limit)
    ds_weights = Weights(pairs.ds_size, pairs.ds_slack, ds_limit)
    weights = {"dq": ds_weights, "dk": ds_weights, "dv": p_weights}
    fmt = arithmetic.output_format
    values = {name: getattr(exact, name) for name in sums}
    errors = {name: total.error(values[name], weights[name]) for name, total in sums.items()}
    overflow = _overflow(sums, weights, pairs, arithmetic)
    intervals = _intervals(lambda x, error, past: _interval(x, error, fmt, past), overflow, values, errors)

    @cache
    def stored() -> centred.PredictedPairs:
        return centred.predicted_pairs(pairs, arithmetic, problem.effective_scale)

    @cache
    def of_stored() -> dict[str, Tensor]:
        return {name: centred.gradient_centre(total, stored()) for name, total in sums.items()}

    @cache
    def predictions() -> dict[str, Prediction]:
        variances = rms_backward.backward_variance(
            problem, forward, exact, given, pairs, of_stored(), sums, scores.noise, machine
        )
        linear = rms_backward.first_order(pairs, problem)
        rounded = _after_rounding(values, variances, fmt)
        return {name: _prediction(value, rounded[name], linear[name]) for name, value in values.items()}

    @cache
    def centres() -> dict[str, Interval]:
        ds, p = (Weights(*operand) for operand in stored().magnitudes)
        operands = {"dq": ds, "dk": ds, "dv": p}
        slack = {name: sums[name].error(x, operands[name]) for name, x in of_stored().items()}
        return _intervals(
            lambda x, error, value, past: centred.gradient_interval(x, error, value, fmt, past),
            overflow,
            of_stored(),
            slack,
            values,
        )

    tensors = {}
    for name, interval in intervals.items():
        if given.lse_error is None:
            predict, around = partial(_named, predictions, name), partial(_named, centres, name)
            tensors[name] = TensorBound(interval, predict, fmt.precision <= 11, around)
        else:
            tensors[name] = unpredicted(interval)
    side = SideGradients(problem, forward, exact, given.lse, pairs, scores.noise, arithmetic, machine)
    if exact.dbias is not None and problem.bias is not None:
        bound = _bias_bound(problem, exact.dbias, pairs, machine)
        tensors["dbias"] = bound if given.lse_error is not None else replace(bound, predict=side.bias)
    if exact.dsink is not None and problem.sink is not None:
        bound = _sink_bound(problem, exact, given, pairs, machine)
        tensors["dsink"] = bound if given.lse_error is not None else replace(bound, predict=side.sink)
    if with_scale:
        interval = scale_interval(problem, forward, exact, pairs, scores, machine)
        predict_scale = partial(
            scale_prediction, problem, forward, exact, given.lse, pairs, arithmetic, machine
        )
        tensors["dscale"] = (
            unpredicted(interval)
            if given.lse_error is not None
            else TensorBound(interval, predict_scale, prediction_gates=False, centre=lambda: None)
        )
    return BackwardBound(tensors)


def _named(made: Callable[[], dict[str, T]], name: str) -> T:
    return made()[name]


def _after_rounding(
    values: dict[str, Tensor], variances: dict[str, Tensor], fmt: Format
) -> dict[str, Tensor]:
    """``rms.after_rounding`` of each; small ones together, as one tensor."""
    if sum(x.numel() for x in values.values()) > FEW:
        return {name: after_rounding(x, variances[name], fmt) for name, x in values.items()}
    whole = after_rounding(_joined(values.values()), _joined(variances[name] for name in values), fmt)
    return dict(zip(values, pieces(whole, [x.shape for x in values.values()]), strict=True))


def _prediction(value: Tensor, rms: Tensor, linear: Tensor) -> Prediction:
    """Where the errors are of first order, and the gradient and their variance finite."""
    holds = linear.expand_as(value)
    if not math.isfinite(float(value.sum())):
        holds = holds & torch.isfinite(value)
    return Prediction.where(rms, holds)


def _intervals(
    function: Callable[..., Interval], overflow: dict[str, Tensor | None], *tensors: dict[str, Tensor]
) -> dict[str, Interval]:
    """``function`` of each name's tensors and overflow, elementwise; small ones together, as one tensor."""
    names = list(overflow)
    if sum(tensors[0][name].numel() for name in names) > FEW:
        return {name: function(*(x[name] for x in tensors), overflow[name]) for name in names}
    shapes = [tensors[0][name].shape for name in names]
    past = None
    if any(x is not None for x in overflow.values()):
        never = torch.zeros((), dtype=torch.bool, device=tensors[0][names[0]].device)
        lines = {name: never if x is None else x for name, x in overflow.items()}
        past = _joined(lines[name].expand(shape) for name, shape in zip(names, shapes, strict=True))
    whole = function(*(_joined(x[name] for name in names) for x in tensors), past)
    return dict(zip(names, apart(whole, shapes), strict=True))


def _joined(tensors: Iterable[Tensor]) -> Tensor:
    """All elements in one dimension."""
    return torch.cat([x.flatten() for x in tensors])


def _nothing(exact: BackwardQuantities, fmt: Format, *, with_scale: bool) -> BackwardBound:
    """No pair exists: every gradient is exactly 0."""
    named = {"dq": exact.dq, "dk": exact.dk, "dv": exact.dv, "dbias": exact.dbias, "dsink": exact.dsink}
    if with_scale:
        named["dscale"] = exact.dscale
    bounds = {
        name: unpredicted(rounded_interval(x, torch.zeros_like(x), fmt))
        for name, x in named.items()
        if x is not None
    }
    return BackwardBound(bounds)


def _overflow(
    sums: dict[str, GradientSum], weights: dict[str, Weights], pairs: PairErrors, arithmetic: Arithmetic
) -> dict[str, Tensor | None]:
    """Elements whose computation may leave the range of fp32, or of a format that partial sums
    are kept in, on the way; shapes of q, k, v, or None where none can."""
    kept, grouped = arithmetic.grad_accumulator_format, arithmetic.group_grad_format
    stores = (FP32_MAX, *(f.max_finite for f in (kept, grouped) if f is not None))
    limit = min(stores) * (1 - 2.0**-10)
    result = {}
    for name, total in sums.items():
        past = total.may_pass(weights[name], limit)
        where = pairs.overflow_p if name == "dv" else pairs.overflow_ds
        if where is not None:
            if name == "dq":
                lines = where.any(-1, keepdim=True)
            else:
                lines = sum_group(where.any(-2).unsqueeze(-1).double(), total.problem) > 0
            past = lines if past is None else past | lines
        result[name] = past
    return result


def _interval(exact: Tensor, error: Tensor, fmt: Format, overflow: Tensor | None = None) -> Interval:
    """Gradients whose exact value is not finite are unlimited here; the non-finite checks judge them."""
    overflow = None if overflow is None else overflow.expand_as(exact)
    if math.isfinite(float(exact.sum() + error.sum())):
        return rounded_interval(exact, error, fmt, overflow)
    finite = torch.isfinite(exact)
    error = torch.where(finite, error.nan_to_num(torch.inf, torch.inf), torch.inf)
    return rounded_interval(torch.where(finite, exact, 0.0), error, fmt, overflow)


def _bias_bound(problem: Problem, exact: Tensor, pairs: PairErrors, machine: Machine) -> TensorBound:
    """[G6] dbias sums dS over the dimensions along which the bias was broadcast."""
    assert problem.bias is not None
    dims = [d for d in range(4) if problem.bias.shape[d] == 1 and pairs.ds_plain.shape[d] != 1]
    size = pairs.ds_plain.abs() + pairs.ds_plain_error
    terms = math.prod(pairs.ds_plain.shape[d] for d in dims)
    error, total = pairs.ds_plain_error, size
    if dims:
        error, total = error.sum(dims, keepdim=True), total.sum(dims, keepdim=True)
    error = error + machine.vector.gamma(terms) * total + 3 * terms * flushed(machine)
    overflow = pairs.overflow_ds
    if overflow is not None:
        for dim in dims:
            overflow = overflow.any(dim, keepdim=True)
    return unpredicted(_interval(exact, error, format_of(problem.bias.dtype), overflow))


def _sink_bound(
    problem: Problem, exact: BackwardQuantities, given: Given, pairs: PairErrors, machine: Machine
) -> TensorBound:
    """[G7] dsink = -sum_i p_sink,i delta_i, with p_sink = exp(sink - L)."""
    assert problem.sink is not None
    assert exact.dsink is not None
    sink = problem.sink.double().view(1, -1, 1)
    stored = torch.where(torch.isfinite(given.lse), given.lse.double(), 0.0)
    log_p = torch.where(torch.isfinite(given.lse), sink - stored, -torch.inf)
    relative = 2 * UNIT * (stored.abs() + sink.abs()) + UNIT * (sink - stored).abs() + pairs.exp_error
    if isinstance(pairs.row_error, Tensor):
        relative = relative + pairs.row_error.squeeze(-1)
    if given.lse_error is not None:
        relative = relative + given.lse_error.nan_to_num(0.0, posinf=torch.inf)
    p_error = weighted_growth(log_p, relative) + pairs.flush
    delta, delta_error = exact.delta, pairs.delta_error.squeeze(-1)
    term = p_error * delta.abs() + (torch.exp(log_p) + p_error) * delta_error
    size = (torch.exp(log_p) + p_error) * (delta.abs() + delta_error)
    terms = size.shape[0] * size.shape[2]
    error = term.sum((0, 2)) + (machine.vector.gamma(terms) + 2 * UNIT) * size.sum((0, 2))
    if lost := flushed(machine):  # of a weight, of delta, of their product, of the sum
        error = error + lost * (delta.abs().sum((0, 2)) + 5 * terms)
    overflow = ~(size.sum((0, 2)) < FP32_MAX)
    if pairs.overflow_delta is not None:
        overflow = overflow | pairs.overflow_delta.squeeze(-1).any(2).any(0)
    return unpredicted(_interval(exact.dsink, error, format_of(problem.sink.dtype), overflow))
