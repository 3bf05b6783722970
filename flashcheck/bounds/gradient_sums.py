"""The three products of a backward pass, dQ = scale dS K, dK = scale dS^T Q, dV = P^T dO, and the errors
of summing them: THEORY.md section 4.3. Tiers A and C differ in what they put in, not in this."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from flashcheck.arithmetic import Accumulator, Arithmetic, Machine
from flashcheck.bounds.alignment import operand, subnormal_error
from flashcheck.bounds.numbers import SMALLEST_FP32, SMALLEST_NORMAL_FP32, UNIT, flushed
from flashcheck.bounds.products import by_kv_head, weighted
from flashcheck.bounds.tiling import SMALLEST_TILE
from flashcheck.formats import FP32, Format, format_of, half_ulp, is_power_of_two
from flashcheck.problem import Problem


def tiles_of(length: int, block: int | None) -> int:
    """Tiles along a length; an undeclared tile has at least SMALLEST_TILE entries."""
    return max(-(-length // (block or SMALLEST_TILE)), 1)


def sum_group(x: Tensor, problem: Problem) -> Tensor:
    """(B, H, ...) summed over the query heads of each group: (B, Hkv, ...)."""
    if problem.group == 1:
        return x
    return x.view(x.shape[0], problem.num_kv_heads, problem.group, *x.shape[2:]).sum(2)


def dout_of(problem: Problem) -> Tensor:
    """The output gradient in float64, zero where the problem has none."""
    if problem.dout is None:
        shape = (problem.batch, problem.num_heads, problem.num_queries, problem.value_dim)
        return torch.zeros(shape, dtype=torch.float64, device=problem.q.device)
    return problem.dout.double()


def dout_format(problem: Problem, arithmetic: Arithmetic) -> Format:
    """The format in which the output gradient enters products: its own where none is declared for them."""
    own = FP32 if problem.dout is None else format_of(problem.dout.dtype)
    return arithmetic.product_format or own


@dataclass(frozen=True)
class Weights:
    """What dO, Q or K is multiplied by, (B, H, Nq, Nk): the magnitude of P or dS, and how far the stored
    operand may lie from it. ``limit``: on the sum of both, where it is known."""

    size: Tensor
    slack: Tensor
    limit: float | None = None
    _charged: list[tuple[Tensor, float]] = field(default_factory=list, init=False, repr=False, compare=False)

    @cached_property
    def largest(self) -> float:
        """Limit on the magnitude of the stored operands."""
        if self.limit is not None:
            return self.limit
        return float(self.size.amax() + self.slack.amax()) if self.size.numel() else 0.0

    def charged(self, share: float) -> Tensor:
        """slack + share * size; valid until the next call. dQ and dK ask with shares of their own."""
        if not self._charged:
            self._charged[:] = [(torch.add(self.slack, self.size, alpha=share), share)]
        made, before = self._charged[0]
        if before != share:
            made.add_(self.size, alpha=share - before)
            self._charged[:] = [(made, share)]
        return made


@dataclass(frozen=True)
class GradientSum:
    """One of the products: factor * sum of weights times ``other``.

    Attributes:
        name: dq, dk or dv.
        problem, arithmetic: what is computed.
        unit: adds the products.
        formats: of the weights (dS or P) and of ``other``, as the products take them.
        other: K (B, Hkv, Nk, d), or Q or dO (B, H, Nq, .), float64.
        factor: scale, or the descale of V for dv.
        flushed: what an fp32 operation loses on a subnormal operand or result.
    """

    name: str
    problem: Problem
    arithmetic: Arithmetic
    unit: Accumulator
    formats: tuple[Format, Format]
    other: Tensor
    factor: float
    flushed: float

    @property
    def over_keys(self) -> bool:
        """dQ sums over keys; dK and dV sum over queries and over the query heads of a group."""
        return self.name == "dq"

    @property
    def terms(self) -> int:
        """Products added into one element."""
        return self.problem.num_keys if self.over_keys else self.problem.num_queries * self.problem.group

    @property
    def tiles(self) -> int:
        """Tiles within one head, after each of which a narrow sum is stored."""
        if self.over_keys:
            return tiles_of(self.problem.num_keys, self.arithmetic.block_keys)
        return tiles_of(self.problem.num_queries, self.arithmetic.block_queries)

    @property
    def group_format(self) -> Format | None:
        """Format of the gradients of single heads, where they are rounded before the group's sum."""
        narrow = self.arithmetic.group_grad_format
        return None if self.over_keys or self.problem.group == 1 else narrow

    @cached_property
    def size(self) -> Tensor:
        """|other|."""
        return self.other.abs()

    @cached_property
    def square(self) -> Tensor:
        """other^2."""
        return self.other.square()

    def apply(self, weights: Tensor, other: Tensor, *, per_head: bool = False) -> Tensor:
        """weights (B, H, Nq, Nk) times ``other`` (shaped as ``self.other``), without the factor.

        Args:
            per_head: dK and dV of every query head apart, (B, H, Nk, .).
        """
        if self.over_keys:
            return weighted(self.problem, weights, other)
        if not per_head and weights.shape[1] != self.problem.num_kv_heads:
            weights, other = by_kv_head(self.problem, weights), by_kv_head(self.problem, other)
        return weights.mT @ other

    def error(self, exact: Tensor, weights: Weights) -> Tensor:
        """Terms [G1] to [G5]: error of the sum before it is stored; shape of the gradient.

        Args:
            exact: the sum itself (the gradient, or tier C's centre).
            weights: |operand| (B, H, Nq, Nk): |dS| or P; and what the computed operand may differ by.
        """
        a, factor, size, slack = self.arithmetic, abs(self.factor), weights.size, weights.slack
        block = self.arithmetic.block_keys if self.over_keys else self.arithmetic.block_queries
        runs = 1 if self.over_keys else self.problem.group
        gamma = self.unit.gamma(self.terms, block or SMALLEST_TILE, runs)
        on_both = gamma  # relative to |operand| + slack
        if a.scale_placement == "operands" and self.name != "dv":
            on_both += 3 * UNIT  # the products take q and k times sqrt(scale), rounded
        if self.name == "dv" and not is_power_of_two(a.probability_scale):
            on_both += 3 * UNIT
        charged = weights.charged(on_both / (1 + on_both))  # [G1], [G2]
        error = self.apply(charged, self.size).mul_((1 + on_both) * factor * (1 + 2 * UNIT))
        subnormal = self._subnormal(size, slack)
        if isinstance(subnormal, Tensor):
            error.add_(subnormal, alpha=factor * (1 + 2 * UNIT))
        steps = 0.0
        if self.name != "dv" or factor != 1.0:
            error.add_(exact.abs(), alpha=2 * UNIT)
            steps = 2.0
            if a.scale_placement == "operands":
                error.add_(self._subnormal_scaled(size, slack))
        before = max(factor, 1.0) if a.scaled_grad_score_format is not None else factor
        floor = self.unit.floor(self.terms) * before + self.terms * SMALLEST_FP32 * steps
        if self.unit.flush_subnormals:  # once more after the factor, and where a tile's sum is read again
            floor += self.terms * 2 * SMALLEST_NORMAL_FP32
        # Sums over tiles and heads that are read again, and the factor: [G5].
        floor += self.flushed * (2 * self.tiles * runs + 3) * max(factor, 1.0)
        error.add_(floor / min(a.probability_scale, 1.0))  # [G5]
        narrow = self.group_format
        if a.grad_accumulator_format is None and narrow is None:
            return error
        partial = self.partial(size, slack, per_head=True) * (1 + on_both)
        stored = self._tile_roundings(partial)
        if narrow is not None:  # [G4]
            stored = stored + half_ulp(partial, narrow)
            if narrow.precision <= 11:  # the sum over the group is stored so as well
                stored = stored + self.problem.group * narrow.unit_roundoff * partial
        return error + (stored if self.over_keys else sum_group(stored, self.problem))

    def _subnormal(self, size: Tensor, slack: Tensor) -> Tensor | float:
        """[G2] Subnormal operands, without the factor; 0 where there are none."""
        if not (self.unit.alignment or self.unit.flush_subnormals):
            return 0.0
        weights, other = self.formats
        unit = 1.0
        if self.name == "dv":
            unit = 1 / self.arithmetic.probability_scale
        elif self.arithmetic.scaled_grad_score_format is not None and self.factor:
            unit = 1 / abs(self.factor)  # stored are dS times the scale
        return subnormal_error(
            self.unit,
            operand(size + slack, weights, least=size - slack, unit=unit),
            operand(self.size, other),
            self.apply,
        )

    def _subnormal_scaled(self, size: Tensor, slack: Tensor) -> Tensor | float:
        """[G5] q and k times sqrt(scale) where that is subnormal: half of fp32's smallest number each."""
        root = abs(self.factor) ** 0.5
        low = (self.size > 0) & (self.size * min(root, 1.0) < SMALLEST_NORMAL_FP32)
        if not bool(low.any()):
            return 0.0
        lost = SMALLEST_FP32 / 2 + self.flushed * (1 + root)
        return self.apply(size + slack, low.double()).mul_(lost * root)

    def partial(self, size: Tensor, slack: Tensor, *, per_head: bool = False) -> Tensor:
        """Largest partial sum on the way, the factor included."""
        return self.apply(size + slack, self.size, per_head=per_head).mul_(abs(self.factor))

    def _tile_roundings(self, partial: Tensor) -> Tensor:
        """[G3] Gradients that are kept in a narrow format while they are summed over tiles."""
        kept = self.arithmetic.grad_accumulator_format
        if kept is None:
            return torch.zeros_like(partial)
        # Each store errs by half an ulp of a partial sum, which earlier stores may have enlarged.
        growth = (1 + kept.unit_roundoff) ** self.tiles
        return self.tiles * half_ulp(partial * growth, kept)

    def may_pass(self, weights: Weights, limit: float) -> Tensor | None:
        """Elements whose sum may pass ``limit`` on the way, before or after the factor; None: none can."""
        most = max(1.0, abs(self.factor))
        largest = weights.largest * float(self.size.amax()) if self.size.numel() else 0.0
        if math.isfinite(largest) and largest * self.terms * most < limit:
            return None
        before = self.apply(weights.size + weights.slack, self.size)  # NaN of inf * 0 may pass too
        return ~(before.mul_(most) < limit)


def gradient_sums(problem: Problem, arithmetic: Arithmetic, machine: Machine) -> dict[str, GradientSum]:
    """dq, dk and dv by name."""
    p_operand = arithmetic.product_format or arithmetic.probability_format
    ds_operand = arithmetic.product_format or arithmetic.grad_operand_format
    p_unit, ds_unit = machine.accumulator(p_operand), machine.accumulator(ds_operand)
    scale = problem.effective_scale
    narrow = ds_operand, arithmetic.product_format or arithmetic.input_format
    wide = p_operand, dout_format(problem, arithmetic)
    lost = flushed(machine)
    return {
        "dq": GradientSum("dq", problem, arithmetic, ds_unit, narrow, problem.k.double(), scale, lost),
        "dk": GradientSum("dk", problem, arithmetic, ds_unit, narrow, problem.q.double(), scale, lost),
        "dv": GradientSum("dv", problem, arithmetic, p_unit, wide, dout_of(problem), problem.v_descale, lost),
    }
