"""Forward pass: online softmax over key tiles, or eager softmax over whole rows."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flashcheck.arithmetic import Arithmetic, Machine
from flashcheck.emulator import functions
from flashcheck.emulator.rounding import fp32, product_operand, round_to, stored
from flashcheck.emulator.scores import Scores, finite_reference
from flashcheck.emulator.tiles import key_tiles
from flashcheck.emulator.units import add_up, kept, multiply_add
from flashcheck.kernel import ForwardResult
from flashcheck.problem import Problem


@dataclass(frozen=True, slots=True)
class Partial:
    """State of the online softmax, float32.

    Attributes:
        reference: (B, H, Nq) maximum that is subtracted, in the units of the score tile; -inf: none yet.
        row_sum: (B, H, Nq), lifted where the exponent is; total: (B, H, Nq, dv) unnormalised output, times
            the probability scale.
    """

    reference: Tensor
    row_sum: Tensor
    total: Tensor


def forward(problem: Problem, arithmetic: Arithmetic, machine: Machine) -> ForwardResult:
    """The output and log-sum-exp that ``arithmetic`` on ``machine`` gives for ``problem``."""
    machine = arithmetic.on(machine)
    scores = Scores(problem, arithmetic, machine)
    values = _Values(problem, arithmetic, machine)
    if arithmetic.normalise == "before_product":
        return _eager(scores, values)
    starts = [_start(problem) for _ in range(arithmetic.splits)]
    if problem.sink is not None and arithmetic.sink_position == "first":
        starts[0] = _start_with_sink(starts[0], problem.sink, scores)
    groups = key_tiles(problem.num_keys, arithmetic)
    parts = [_visit(scores, values, tiles, start) for tiles, start in zip(groups, starts, strict=False)]
    state = parts[0]
    for part in parts[1:]:
        state = _merge(state, part, scores)
    return _finish(state, scores)


class _Values:
    """V as the second product takes it, and that product."""

    def __init__(self, problem: Problem, arithmetic: Arithmetic, machine: Machine) -> None:
        v = problem.v.float().repeat_interleave(problem.group, 1)
        self.arithmetic = arithmetic
        self.format = arithmetic.product_format or arithmetic.probability_format
        self.unit = machine.accumulator(self.format)
        self.v = product_operand(v, arithmetic)
        # Hidden values meet P = 0. Where some value is not finite the pair must be skipped instead.
        self.all_finite = bool(torch.isfinite(v).all())

    def add_product(self, p: Tensor, keys: slice, total: Tensor, seen: Tensor) -> Tensor:
        """total + P V for a range of keys; P is converted to the product's format first."""
        p = product_operand(p, self.arithmetic)
        skip = None if self.all_finite else seen
        other = self.arithmetic.product_format or self.arithmetic.input_format
        return multiply_add(p, self.v[..., keys, :], total, self.unit, self.format, skip, other)


def _start(problem: Problem) -> Partial:
    shape = (problem.batch, problem.num_heads, problem.num_queries)
    return Partial(torch.full(shape, -torch.inf), torch.zeros(shape), torch.zeros(*shape, problem.value_dim))


def _start_with_sink(start: Partial, sink: Tensor, scores: Scores) -> Partial:
    """The sink as a key that was seen before all others: it is the reference, its weight is 1, or lifted."""
    reference = (sink.float() / fp32(scores.natural)).view(1, -1, 1).expand_as(start.reference)
    return Partial(
        reference, torch.where(torch.isneginf(reference), 0.0, scores.arithmetic.lifted), start.total
    )


def _visit(scores: Scores, values: _Values, tiles: list[slice], state: Partial) -> Partial:
    """The online softmax over some tiles."""
    arithmetic, vector = scores.arithmetic, scores.machine.vector
    for keys in tiles:
        seen = scores.visible[..., keys]
        tile = scores.tile(keys)
        reference = _next_reference(state.reference, tile, scores)
        state = _rescaled(state, reference, scores)
        p = torch.where(seen, scores.weigh(scores.exponent(tile, reference)), 0.0)
        factor = fp32(arithmetic.probability_scale / arithmetic.lifted)
        rounded = round_to(p * factor, arithmetic.probability_format)
        summand = rounded / factor if arithmetic.row_sum == "rounded" else p
        state = Partial(
            reference,
            add_up(summand, state.row_sum, vector),
            values.add_product(rounded, keys, state.total, seen),
        )
    return state


def _next_reference(old: Tensor, tile: Tensor, scores: Scores) -> Tensor:
    """The running maximum, kept where it grew by no more than the rescale threshold."""
    new = torch.maximum(old, tile.amax(-1)) if tile.shape[-1] else old
    threshold = scores.arithmetic.rescale_threshold
    if threshold == 0:
        return new
    log2_growth = -scores.growth(old, new)
    if scores.base != 2.0:
        log2_growth = log2_growth * fp32(1.4426950408889634)
    return torch.where(log2_growth <= threshold, old, new)


def _rescaled(state: Partial, reference: Tensor, scores: Scores) -> Partial:
    factor = scores.rescale_factor(state.reference, reference)
    machine = scores.machine
    total = kept(kept(state.total, machine) * factor.unsqueeze(-1), machine)
    return Partial(reference, kept(state.row_sum * factor, machine), total)


def _merge(one: Partial, other: Partial, scores: Scores) -> Partial:
    """Two partial results over disjoint keys."""
    reference = torch.maximum(one.reference, other.reference)
    one, other = _rescaled(one, reference, scores), _rescaled(other, reference, scores)
    total = kept(one.total + other.total, scores.machine)
    return Partial(reference, one.row_sum + other.row_sum, total)


def _finish(state: Partial, scores: Scores) -> ForwardResult:
    """Adds the sink, divides, and stores."""
    arithmetic, machine, problem = scores.arithmetic, scores.machine, scores.problem
    maximum = scores.maximum(state.reference)
    row_sum, total = state.row_sum, state.total
    if problem.sink is not None and arithmetic.sink_position == "last":
        maximum, factor, sink = _with_sink(maximum, problem.sink, scores)
        row_sum = row_sum * factor + sink
        total = kept(kept(total, machine) * factor.unsqueeze(-1), machine)
    divisor = row_sum * fp32(arithmetic.probability_scale / arithmetic.lifted)
    inverse = _inverse(divisor, scores)
    out = kept(kept(total, machine) * (inverse * fp32(problem.v_descale)).unsqueeze(-1), machine)
    return ForwardResult(
        stored(out, arithmetic.output_format), log_sum_exp(maximum, row_sum, arithmetic, machine)
    )


def _inverse(row_sum: Tensor, scores: Scores) -> Tensor:
    """1 / row_sum; 0 in rows that see nothing. A row that does see something and whose scores all overflowed
    to -inf gets infinity, hence NaN for its output: 0 would be a finite wrong answer (contract, point 7)."""
    nothing = (row_sum == 0) & ~scores.weighs
    return torch.where(nothing, 0.0, functions.reciprocal(row_sum, scores.machine))


def _with_sink(maximum: Tensor, sink: Tensor, scores: Scores) -> tuple[Tensor, Tensor, Tensor]:
    """Maximum with the sink (natural units), the factor for what was summed so far, the sink's weight."""
    logit = sink.float().view(1, -1, 1).expand_as(maximum)
    top = torch.maximum(maximum, logit)
    safe = finite_reference(top)

    def weight(x: Tensor) -> Tensor:
        return scores.exponential(x - safe, base=torch.e)

    return top, weight(maximum), weight(logit)


def log_sum_exp(maximum: Tensor, row_sum: Tensor, arithmetic: Arithmetic, machine: Machine) -> Tensor:
    """maximum + ln(row_sum), -inf where nothing was summed, stored in the declared format."""
    lse = kept(kept(maximum, machine) + functions.logarithm(row_sum, machine), machine)
    return stored(torch.where(row_sum == 0, -torch.inf, lse), arithmetic.lse_format)


@dataclass(frozen=True, slots=True)
class _EagerRows:
    """Whole rows of an eager softmax: shares (B, H, Nq, Nk), maximum and row sum (B, H, Nq); float32."""

    shares: Tensor
    maximum: Tensor
    row_sum: Tensor


def _eager_rows(scores: Scores) -> _EagerRows:
    machine, problem = scores.machine, scores.problem
    start = _start(problem)
    tile = scores.tile(slice(0, problem.num_keys))
    reference = _next_reference(start.reference, tile, scores)
    p = torch.where(scores.visible, scores.weigh(scores.exponent(tile, reference)), 0.0)
    row_sum = add_up(p, start.row_sum, machine.vector)
    maximum = reference * fp32(scores.natural)
    if problem.sink is not None:
        maximum, factor, sink = _with_sink(maximum, problem.sink, scores)
        row_sum = row_sum * factor + sink
        p = p * factor.unsqueeze(-1)
    inverse = _inverse(row_sum, scores)
    return _EagerRows(kept(p * inverse.unsqueeze(-1), machine), maximum, row_sum)


def eager_shares(scores: Scores) -> Tensor:
    """The normalised P of an eager softmax before it is rounded, (B, H, Nq, Nk) float32."""
    return _eager_rows(scores).shares


def _eager(scores: Scores, values: _Values) -> ForwardResult:
    """Softmax over whole rows, normalised before it enters the second product."""
    arithmetic, machine, problem = scores.arithmetic, scores.machine, scores.problem
    rows = _eager_rows(scores)
    scale = fp32(arithmetic.probability_scale)
    rounded = round_to(rows.shares * scale, arithmetic.probability_format)
    every = slice(0, problem.num_keys)
    out = values.add_product(rounded, every, _start(problem).total, scores.visible)
    out = kept(kept(out, machine) * fp32(problem.v_descale / scale), machine)
    lse = log_sum_exp(rows.maximum, rows.row_sum, arithmetic, machine)
    return ForwardResult(stored(out, arithmetic.output_format), lse)
