"""Proved bounds on a rung's own error, element by element: one derivation for every rung.

A rung differs from the others only in how accurate its elementary operations are; ``Unit`` says that,
and README.md ("The running bound") derives what follows. Everything is evaluated in float64 from the
rung's *computed* values: the softmax lemma is symmetric in exact and computed probabilities.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from flashcheck.oracle.common_unit import EVALUATION, lowest_bit
from flashcheck.oracle.operands import (
    Operands,
    by_head,
    by_kv_head,
    operands,
    reduce_like,
    stored_rows,
    without_hidden,
)
from flashcheck.oracle.quantities import BackwardQuantities, ForwardQuantities
from flashcheck.oracle.unit import Unit
from flashcheck.problem import Problem

_UNDERFLOW = 2.0**-1000
"""More than any rung loses when a result leaves float64's normal range, double-double's low half included."""


@dataclass(frozen=True, slots=True)
class ForwardError:
    """Bounds on |computed - exact|; shapes as in ``ForwardQuantities``. inf: nothing is proved.

    ``products``, ``scores`` and ``probabilities`` hold 0 at hidden pairs.
    """

    out: Tensor
    lse: Tensor
    products: Tensor
    scores: Tensor
    probabilities: Tensor


@dataclass(frozen=True, slots=True)
class BackwardError:
    """Bounds on |computed - exact|; shapes as in ``BackwardQuantities``."""

    dq: Tensor
    dk: Tensor
    dv: Tensor
    dbias: Tensor | None
    dsink: Tensor | None
    dscale: Tensor


def forward_error(
    problem: Problem, got: ForwardQuantities, unit: Unit, rows: Tensor | None = None
) -> ForwardError:
    """Bounds for the forward quantities that a rung computed for the query rows ``rows``."""
    x = without_hidden(problem, operands(problem, rows))
    scores = _score_error(problem, x, got, unit)
    softmax = _softmax_error(x, got, scores, unit)
    return ForwardError(
        out=_out_error(problem, x, got, softmax, unit),
        lse=_lse_error(x, got, softmax, unit),
        products=torch.where(x.visible, scores.products, 0.0),
        scores=torch.where(x.visible, scores.scores, 0.0),
        probabilities=softmax.probabilities,
    )


@dataclass(frozen=True, slots=True)
class _Scores:
    """(B, H, R, Nk) each: |q . k| and its error, the errors of scale * q . k and of the score."""

    raw: Tensor
    raw_error: Tensor
    products: Tensor
    scores: Tensor


def _score_error(problem: Problem, x: Operands, got: ForwardQuantities, unit: Unit) -> _Scores:
    op, scale = unit.operation, abs(problem.effective_scale)
    q, k = by_kv_head(problem, x.q), x.k.mT
    magnitude = by_head(problem, q.abs() @ k.abs())
    exact = magnitude * EVALUATION < 2.0**53 * _common_unit(problem, x)
    raw_error = torch.where(exact, 0.0, magnitude * unit.dot(problem.head_dim) + _UNDERFLOW)
    raw = by_head(problem, q @ k).abs() + magnitude * 2.0**-40
    products = scale * raw_error + op * got.products.abs() + _UNDERFLOW
    products = products * EVALUATION
    error, size = products, got.products.abs()
    if problem.softcap is not None:
        # |softcap'| is largest at the end of the uncertainty interval that is nearest to 0.
        nearest = (size - products).clamp(min=0.0) / problem.softcap
        size = problem.softcap * torch.tanh(size / problem.softcap)
        error = error * torch.cosh(nearest) ** -2.0 + size * (2 * op + unit.tanh)
        error = error + problem.softcap * unit.tanh_absolute
    if x.bias is not None:
        size = size + x.bias.abs()
        error = error + op * size
    if x.slopes is not None and x.distance is not None:
        alibi = (x.slopes * x.distance).abs()
        size = size + alibi
        error = error + op * (alibi + size)
    return _Scores(raw, raw_error, products, error * EVALUATION + _UNDERFLOW)


def _common_unit(problem: Problem, x: Operands) -> Tensor:
    """(B, H, R, Nk) powers of two of which every product q_ic k_jc is a multiple.

    Sums of such products are exact in any order, in every rung, while sum |q||k| stays below 2^53
    units: the case for 8- and 16-bit inputs of ordinary spread.
    """
    q, k = lowest_bit(x.q).unsqueeze(-1), lowest_bit(x.k).unsqueeze(2)
    return by_head(problem, by_kv_head(problem, q) * k)


@dataclass(frozen=True, slots=True)
class _Softmax:
    """What errors of the exponents do to a normalised row.

    ``moved``, ``raised`` and ``lowest`` measure them against those of the largest weight where that is
    smaller: what all exponents of a row have in common cancels.

    Attributes:
        moved: (B, H, R, Nk) |exp(delta_j) - 1| p_j at most, underflow included.
        raised: (B, H, R) sum_j of that, the sink included; lowest: what the sum of weights keeps.
        log_sum: (B, H, R) bound on |log of the sum of the moved weights|.
        rounding: error of the row sum and of the division, relative.
        probabilities: (B, H, R, Nk) bound on the error of p.
        sink, sink_error: (B, H, R) the sink's probability and its error.
    """

    moved: Tensor
    raised: Tensor
    lowest: Tensor
    log_sum: Tensor
    rounding: float
    probabilities: Tensor
    sink: Tensor
    sink_error: Tensor


def _softmax_error(x: Operands, got: ForwardQuantities, scores: _Scores, unit: Unit) -> _Softmax:
    op, n = unit.operation, x.visible.shape[-1]
    exp = -math.log1p(-unit.exp)
    shift = torch.where(got.row_max == -torch.inf, 0.0, got.row_max)
    divisor = torch.where(got.row_sum == 0, 1.0, got.row_sum)
    floor = (_UNDERFLOW / divisor).unsqueeze(-1)
    distance = torch.where(x.visible, (got.scores - shift.unsqueeze(-1)).abs(), 0.0)
    exponents = torch.where(x.visible, scores.scores + op * distance + exp, 0.0)
    # Scores that overflowed, or a row whose weights all vanished, say nothing about the exact weights.
    known = (got.row_sum > 0) & torch.isfinite(exponents).all(-1)
    exponents = torch.where(known.unsqueeze(-1), exponents, torch.inf)
    weights = torch.where(x.visible, got.probabilities + floor, 0.0)
    if x.sink is not None:  # one more key, of value 0
        sink_exponent = op * (x.sink - shift).abs() + exp
        sink = torch.exp(x.sink - shift) / divisor + _UNDERFLOW
        exponents = torch.cat([exponents, sink_exponent.unsqueeze(-1)], -1)
        weights = torch.cat([weights, sink.unsqueeze(-1)], -1)
    lost = (n + 1) * floor.squeeze(-1)
    raised, fall = _moved_sums(weights, exponents, lost)
    log_sum = torch.maximum(torch.log1p(raised), -torch.log1p(-fall.clamp(max=1.0)))
    widest = exponents.amax(-1) if exponents.shape[-1] else torch.zeros_like(shift)
    log_sum = torch.minimum(log_sum.nan_to_num(nan=torch.inf), widest + lost)

    # A common factor of the weights cancels, so the largest weight may count as exact at the expense
    # of all others: decisive where one key has nearly all the weight.
    against_top = _against_largest(weights, exponents)
    raised_top, fall_top = _moved_sums(weights, against_top, lost)
    better = known & (raised_top < raised)
    exponents = torch.where(better.unsqueeze(-1), against_top, exponents)
    raised, fall = torch.where(better, raised_top, raised), torch.where(better, fall_top, fall)

    lowest = (1.0 - fall).clamp(min=0.0)
    rounding = (unit.dot(n + 1) + op) * EVALUATION
    spread = torch.expm1(exponents)
    relative = (spread + raised.unsqueeze(-1)) / lowest.unsqueeze(-1)
    error = _proved(weights * relative, 1.0) + floor + rounding * weights
    moved = torch.where(x.visible, weights[..., :n] * spread[..., :n] + floor, 0.0)
    no_sink = torch.zeros_like(shift)
    return _Softmax(
        moved=moved,
        raised=raised,
        lowest=lowest,
        log_sum=log_sum,
        rounding=rounding,
        probabilities=torch.where(x.visible, error[..., :n] * EVALUATION, 0.0),
        sink=no_sink if x.sink is None else weights[..., n],
        sink_error=no_sink if x.sink is None else error[..., n] * EVALUATION,
    )


def _moved_sums(weights: Tensor, exponents: Tensor, lost: Tensor) -> tuple[Tensor, Tensor]:
    """Most that the sum of weights (1) rises and falls when weight j moves by exp(+-exponent j)."""
    raised = (weights * torch.expm1(exponents)).sum(-1) + lost
    fall = (weights * -torch.expm1(-exponents)).sum(-1) + lost
    return raised * EVALUATION, fall * EVALUATION


def _against_largest(weights: Tensor, exponents: Tensor) -> Tensor:
    """Bounds on |delta_j - delta_top|: 0 for the largest weight, the sum of both bounds for all others."""
    if not weights.shape[-1]:
        return exponents
    top = weights.argmax(-1, keepdim=True)
    return (exponents + exponents.gather(-1, top)).scatter(-1, top, 0.0)


def _out_error(
    problem: Problem, x: Operands, got: ForwardQuantities, softmax: _Softmax, unit: Unit
) -> Tensor:
    values = x.v.abs()
    magnitude = _rows_times(problem, got.probabilities, values)
    moved = _rows_times(problem, softmax.moved, values) + softmax.raised.unsqueeze(-1) * magnitude
    # Whatever the weights are, O lies between the smallest and the largest value, 0 included.
    largest = (
        values.amax(-2, keepdim=True) if problem.num_keys else values.new_zeros(1, problem.num_kv_heads, 1, 1)
    )
    ceiling = 2.0 * largest.repeat_interleave(problem.group, 1)
    error = _proved(moved / softmax.lowest.unsqueeze(-1), ceiling)
    error = error + (softmax.rounding + unit.dot(problem.num_keys)) * magnitude + _UNDERFLOW
    error = error * problem.v_descale + unit.operation * got.out.abs()
    return torch.where(x.alive.unsqueeze(-1), _proved(error * EVALUATION), 0.0)


def _lse_error(x: Operands, got: ForwardQuantities, softmax: _Softmax, unit: Unit) -> Tensor:
    """0 in rows that see no key: -inf or the sink, exactly."""
    log_of_sum = torch.log(torch.where(got.row_sum == 0, 1.0, got.row_sum)).abs()
    error = softmax.log_sum + softmax.rounding + unit.log * log_of_sum + unit.log_absolute
    error = error + unit.operation * (got.lse.abs() + got.row_max.abs())
    return torch.where(x.alive, _proved(error * EVALUATION), 0.0)


def backward_error(
    problem: Problem,
    forward: ForwardQuantities,
    got: BackwardQuantities,
    unit: Unit,
    *,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    rows: Tensor | None = None,
) -> BackwardError:
    """Bounds for the gradients that a rung computed.

    Args:
        forward: the forward quantities of the same rung.
        out, lse: the stored values on which ``got`` is conditional, None where it is from scratch.
        rows: the query rows of which ``forward`` and ``got`` are.
    """
    x = without_hidden(problem, operands(problem, rows))
    out, lse = stored_rows(out, rows), stored_rows(lse, rows)
    scores = _score_error(problem, x, forward, unit)
    softmax = _softmax_error(x, forward, scores, unit)
    p, p_error, sink, sink_error = got.probabilities, softmax.probabilities, softmax.sink, softmax.sink_error
    if lse is not None:
        p_error, sink, sink_error = _stored_probability_error(x, forward, got, scores, lse=lse, unit=unit)

    op = unit.operation
    inherited = (
        _out_error(problem, x, forward, softmax, unit) if out is None else torch.zeros_like(forward.out)
    )
    used = forward.out if out is None else torch.where(x.alive.unsqueeze(-1), out, 0.0)
    delta = got.delta.abs()
    delta_error = (x.dout.abs() * (inherited + unit.dot(problem.value_dim) * used.abs())).sum(-1) + op * delta
    dp_error = problem.v_descale * by_head(problem, by_kv_head(problem, x.dout).abs() @ x.v.mT.abs())
    dp_error = dp_error * unit.dot(problem.value_dim) + op * got.grad_probabilities.abs()
    t_error = dp_error + delta_error.unsqueeze(-1)
    t = difference = (got.grad_probabilities - got.delta.unsqueeze(-1)).abs()
    t = t + 2.0**-52 * (got.grad_probabilities.abs() + delta.unsqueeze(-1))
    t_error = (t_error + op * t) * EVALUATION
    if out is not None:
        exact = _exact_differences(problem, x, used)
        t, t_error = torch.where(exact, difference, t), torch.where(exact, 0.0, t_error)
    ds = got.grad_scores.abs()
    ds_error = p_error * (t + t_error) + p * t_error + op * ds + _UNDERFLOW
    ds_error = torch.where(x.visible, ds_error * EVALUATION, 0.0)

    dx, dx_error = ds, ds_error
    if problem.softcap is not None:
        slope, slope_error = _slope_error(forward.products / problem.softcap, scores, problem.softcap, unit)
        dx = ds * slope
        dx_error = ds_error * (slope + slope_error) + ds * slope_error + op * dx + _UNDERFLOW
        dx_error = torch.where(x.visible, dx_error * EVALUATION, 0.0)

    terms = problem.group * x.q.shape[2]
    scale = abs(problem.effective_scale)
    to_q, to_k, to_dout = x.k.abs(), by_kv_head(problem, x.q).abs(), by_kv_head(problem, x.dout).abs()
    dx_keys = by_kv_head(problem, dx_error + unit.dot(terms) * dx).mT
    p_keys = by_kv_head(problem, p_error + unit.dot(terms) * p).mT
    pairs = scores.raw * dx_error + scores.raw_error * (dx + dx_error)
    pairs = pairs + (op + unit.dot(dx.numel())) * dx * scores.raw
    dscale = torch.where(x.visible, pairs, 0.0).sum() * problem.q_descale * problem.k_descale
    dsink = sink_error * (delta + delta_error) + sink * delta_error
    dsink = dsink + (op + unit.dot(problem.batch * terms)) * sink * delta
    ds_sum = ds_error + unit.dot(ds.numel()) * ds

    def proved(error: Tensor, computed: Tensor) -> Tensor:
        return _proved((error + 4 * op * computed.abs()) * EVALUATION + _UNDERFLOW)

    return BackwardError(
        dq=proved(scale * _rows_times(problem, dx_error + unit.dot(problem.num_keys) * dx, to_q), got.dq),
        dk=proved(scale * (dx_keys @ to_k), got.dk),
        dv=proved(problem.v_descale * (p_keys @ to_dout), got.dv),
        dbias=None if got.dbias is None else proved(reduce_like(ds_sum, got.dbias.shape), got.dbias),
        dsink=None if got.dsink is None else proved(torch.where(x.alive, dsink, 0.0).sum((0, 2)), got.dsink),
        dscale=proved(dscale, got.dscale),
    )


def _exact_differences(problem: Problem, x: Operands, out: Tensor) -> Tensor:
    """(B, H, R, Nk): dP - delta of a stored output is exact in any order, in every rung, as scores can be.

    Both are multiples of one power of two, and their magnitudes sum to less than 2^53 of it. It decides for
    rows that see one key: their O is V, and dP - delta is 0, which no limit relative to |dO||V| can say.
    """
    if math.frexp(problem.v_descale)[0] != 0.5:  # multiplying by it rounds
        return torch.zeros_like(x.visible)
    dout = lowest_bit(x.dout).unsqueeze(-1)
    dp_unit = by_head(problem, by_kv_head(problem, dout) * lowest_bit(x.v).unsqueeze(2)) * problem.v_descale
    delta_unit = dout * lowest_bit(out).unsqueeze(-1)
    delta_unit = torch.minimum(delta_unit, lowest_bit(x.dlse.unsqueeze(-1)).unsqueeze(-1))
    dp = problem.v_descale * by_head(problem, by_kv_head(problem, x.dout).abs() @ x.v.mT.abs())
    delta = (x.dout.abs() * out.abs()).sum(-1) + x.dlse.abs()
    return (dp + delta.unsqueeze(-1)) * EVALUATION < 2.0**53 * torch.minimum(dp_unit, delta_unit)


def _stored_probability_error(
    x: Operands,
    forward: ForwardQuantities,
    got: BackwardQuantities,
    scores: _Scores,
    *,
    lse: Tensor,
    unit: Unit,
) -> tuple[Tensor, Tensor, Tensor]:
    """Errors of p = exp(s - LSE) with a stored LSE; the sink's probability and its error."""
    stored = torch.where(x.alive, lse, 0.0)
    exp = -math.log1p(-unit.exp)
    distance = torch.where(x.visible, (forward.scores - stored.unsqueeze(-1)).abs(), 0.0)
    exponent = scores.scores + unit.operation * distance + exp
    p_error = (got.probabilities + _UNDERFLOW) * torch.expm1(exponent) + _UNDERFLOW
    p_error = torch.where(x.visible, p_error * EVALUATION, 0.0)
    if x.sink is None:
        return p_error, torch.zeros_like(stored), torch.zeros_like(stored)
    sink = torch.exp(x.sink - stored)
    sink_exponent = unit.operation * (x.sink - stored).abs() + exp
    return p_error, sink, (sink + _UNDERFLOW) * torch.expm1(sink_exponent) * EVALUATION + _UNDERFLOW


def _slope_error(z: Tensor, scores: _Scores, softcap: float, unit: Unit) -> tuple[Tensor, Tensor]:
    """sech^2(z) and its error; |d log sech^2 / dz| = 2 |tanh z| <= 2."""
    slope = torch.cosh(z) ** -2.0
    z_error = scores.products / softcap + unit.operation * z.abs()
    error = (slope + _UNDERFLOW) * torch.expm1(2.0 * z_error) + unit.sech2 * slope + _UNDERFLOW
    return slope, _proved(error * EVALUATION, 1.0)


def _rows_times(problem: Problem, weights: Tensor, values: Tensor) -> Tensor:
    """(B, H, R, Nk) times the (B, Hkv, Nk, d) of each head's key head."""
    return by_head(problem, by_kv_head(problem, weights) @ values)


def _proved(error: Tensor, ceiling: Tensor | float = torch.inf) -> Tensor:
    """``error``, at most ``ceiling``; NaN (overflow on the way) proves nothing and counts as inf."""
    error = torch.where(torch.isnan(error), torch.inf, error)
    return torch.minimum(error, torch.as_tensor(ceiling, dtype=error.dtype, device=error.device))
