"""Scores of a key tile, and the exponents that are taken of them, as an Arithmetic places the scale.

Where nothing is added to the scores, the placements ``exponent_fma`` and ``exponent_subtract_first`` keep
the tile as the bare product q . k and bring the scale in with the base change, in one constant. A cap, a
bias or ALiBi need the score itself, so there the scale comes first and the constant is log2(e).
"""

from __future__ import annotations

import math
from functools import cached_property

import torch
from torch import Tensor

from flashcheck.arithmetic import Arithmetic, Machine
from flashcheck.emulator import functions
from flashcheck.emulator.rounding import fp32, product_operand, round_to
from flashcheck.emulator.units import kept, multiply_add
from flashcheck.problem import Problem

_SMALLEST_SCALE = 2.0**-40
"""A sink that joins first is divided by the scale, to be a reference for bare products; not below this."""


class Scores:
    """The score tiles of one problem, float32.

    Attributes:
        visible: (B, H, Nq, Nk) boolean.
        base: of the exponential, 2 or e.
        constant: multiplies the tile in the exponent, 1.0 where the tile is in the exponent's units.
        natural: turns the tile's units into those of the LSE (the scale, where it is still to come).
    """

    def __init__(self, problem: Problem, arithmetic: Arithmetic, machine: Machine) -> None:
        self.problem, self.arithmetic, self.machine = problem, arithmetic, machine
        self.visible = problem.visible()
        q, k = problem.q.float(), problem.k.float().repeat_interleave(problem.group, 1)
        scale = problem.effective_scale
        self._scale = fp32(scale)
        self._added = problem.bias is not None or problem.alibi_slopes is not None
        self._alibi = problem.alibi()
        placement = arithmetic.scale_placement
        bare = placement.startswith("exponent") and not self._added and problem.softcap is None
        if problem.sink is not None and arithmetic.sink_position == "first":
            bare = bare and abs(scale) > _SMALLEST_SCALE
        self._negated = False
        self._root = fp32(math.sqrt(abs(scale)))
        if placement == "operands":
            q, k = (kept(kept(x, machine) * self._root, machine) for x in (q, k))
            self._scale = 1.0
            q = -q if scale < 0 else q
        elif bare and scale < 0:  # the running maximum must be that of the scaled scores
            q, self._scale = -q, -self._scale
            self._negated = True
        self._operand = arithmetic.product_format or arithmetic.input_format
        self._q = product_operand(q, arithmetic)
        self._k = product_operand(k, arithmetic)
        self._q_gradient = (
            self._q if placement == "operands" else product_operand(problem.q.float(), arithmetic)
        )
        self.base = 2.0 if placement.startswith("exponent") else math.e
        self.natural = self._scale if bare else 1.0
        self.constant = 1.0
        if bare:
            twice = arithmetic.scale_roundings > 1
            self.constant = fp32(self._scale * fp32(math.log2(math.e))) if twice else self._fused_constant()
        elif self.base == 2.0:
            self.constant = fp32(math.log2(math.e))
        self._multiplied = not bare and placement != "operands"

    @cached_property
    def weighs(self) -> Tensor:
        """(B, H, Nq) rows that see a key whose score is above -inf by its inputs: a row sum of 0 is wrong
        there, the scores overflowed."""
        q, k = (torch.isfinite(x.float()).all(-1) for x in (self.problem.q, self.problem.k))
        seen = self.visible & k.repeat_interleave(self.problem.group, 1).unsqueeze(-2)
        if self.problem.bias is not None:
            seen = seen & (self.problem.bias > -torch.inf)
        return seen.any(-1) & q

    def _fused_constant(self) -> float:
        return fp32(abs(self.problem.effective_scale) * math.log2(math.e))

    def tile(self, keys: slice, rows: slice = slice(None)) -> Tensor:
        """Scores against a range of keys, -inf where hidden: (B, H, rows, keys)."""
        s = kept(self._product(keys, rows), self.machine)
        if self._multiplied:
            s = self._scaled(s, rows, keys)
        elif self._added or self.problem.softcap is not None:
            s = self._shaped(s.double(), rows, keys)
        if self.arithmetic.scaled_score_format is not None:
            s = round_to(s, self.arithmetic.scaled_score_format)
        return torch.where(self.visible[..., rows, keys], kept(s, self.machine), -torch.inf)

    def bare_product(self, keys: slice, rows: slice) -> Tensor:
        """q . k of a tile, of the operands as they came."""
        if self.arithmetic.scale_placement == "operands":
            k = self.problem.k.float().repeat_interleave(self.problem.group, 1)
            return self._product(keys, rows, (self.problem.q.float(), k))
        product = self._product(keys, rows)
        return -product if self._negated else product

    def _product(self, keys: slice, rows: slice, operands: tuple[Tensor, Tensor] | None = None) -> Tensor:
        """q . k of a tile as it is stored."""
        every_q, every_k = operands or (self._q, self._k)
        q, k = every_q[..., rows, :], every_k[..., keys, :].mT
        start = torch.zeros(*q.shape[:-1], k.shape[-1])
        unit = self.machine.accumulator(self._operand)
        s = multiply_add(q, k, start, unit, self._operand)
        fmt = self.arithmetic.score_format
        if fmt is not None:
            s = round_to(s * self.arithmetic.score_scale, fmt) / self.arithmetic.score_scale
        return s

    def _scaled(self, product: Tensor, rows: slice, keys: slice) -> Tensor:
        exact = product.double() * self._scale
        if self._added or self.problem.softcap is not None:
            return self._shaped(exact, rows, keys)
        return exact.float()

    def _shaped(self, exact: Tensor, rows: slice, keys: slice) -> Tensor:
        """Cap, bias, ALiBi on an unrounded scaled product; the first addition is fused with the scale."""
        cap = self.problem.softcap
        if cap is not None:
            ratio = (exact / fp32(cap)).float()
            exact = functions.tanh(ratio, self.machine).double() * fp32(cap)
        s = exact if self.machine.fused_multiply_add else exact.float().double()
        if self.problem.bias is not None:
            s = (s + _part(self.problem.bias, rows, keys).float().double()).float().double()
        if self._alibi is not None:
            s = s + _part(self._alibi, rows, keys).float().double()
        return s.float()

    def exponent(self, tile: Tensor, reference: Tensor) -> Tensor:
        """What the exponential is taken of: (tile - reference) in units of ``base``."""
        m = finite_reference(reference).unsqueeze(-1)
        if self.constant == 1.0 and self.base != 2.0:
            return tile - m
        if self.arithmetic.scale_placement == "exponent_subtract_first":
            return (tile - m) * self.constant
        # float64 holds the product of two float32 numbers, so only the sum is rounded: fma, but for
        # double rounding in one case out of 2^29.
        product = tile.double() * self.constant
        if not self.machine.fused_multiply_add:
            product = product.float().double()
        return (product - self._subtracted(m).double()).float()

    def _subtracted(self, m: Tensor) -> Tensor:
        """The finite reference ``m`` as the exponent subtracts it, in units of ``base``, less the lift."""
        if self.arithmetic.lifted == 1.0:
            return m * self.constant
        product = m.double() * self.constant  # exact, so that the fused form rounds once
        if not self.machine.fused_multiply_add:
            product = product.float().double()
        return (product - math.log2(self.arithmetic.lifted)).float()

    def maximum(self, reference: Tensor) -> Tensor:
        """A row's reference in natural units, less the lift; -inf where there is none."""
        if self.arithmetic.lifted == 1.0:
            maximum = reference * fp32(self.natural)
        else:
            maximum = self._subtracted(finite_reference(reference)) * fp32(math.log(2.0))
        return torch.where(torch.isneginf(reference), -torch.inf, maximum)

    def growth(self, old: Tensor, new: Tensor) -> Tensor:
        """(old - new) in units of ``base``; -inf where there was no maximum yet."""
        step = (old - finite_reference(new)) * self.constant
        return torch.where(torch.isneginf(old), -torch.inf, step)

    def exponent_against_lse(self, tile: Tensor, lse: Tensor) -> Tensor:
        """(tile - lse) in units of ``base``: what a backward takes the exponential of."""
        reference = lse.unsqueeze(-1)
        if self.base != 2.0:
            return tile - reference
        subtracted = (reference * fp32(math.log2(math.e))).double()
        product = tile.double() * self.constant
        if not self.machine.fused_multiply_add:
            product = product.float().double()
        return (product - subtracted).float()

    def weigh(self, exponent: Tensor) -> Tensor:
        """base^exponent by the kernel's exponential."""
        return self.exponential(exponent, base=self.base, exact_at_zero=self.arithmetic.exp_error is None)

    def exponential(self, x: Tensor, *, base: float, exact_at_zero: bool = True) -> Tensor:
        """base^x with the errors that arithmetic and machine allow."""
        return functions.exponential(
            x,
            self.machine,
            base=base,
            error=self.arithmetic.exp_error,
            flush=self.arithmetic.exp_flush,
            exact_at_zero=exact_at_zero,
        )

    def rescale_factor(self, old: Tensor, new: Tensor) -> Tensor:
        """What results against the old reference are multiplied by: 1 where it did not move."""
        return self.exponential(self.growth(old, new), base=self.base)

    @property
    def operands(self) -> tuple[Tensor, Tensor]:
        """q (B, H, Nq, d) and k (B, H, Nk, d) as the products of a backward take them."""
        return self._q_gradient, self._k

    @property
    def gradient_factors(self) -> tuple[float, float]:
        """What dS K and dS^T Q of those operands are multiplied by."""
        scale = self.problem.effective_scale
        if self.arithmetic.scale_placement == "operands":  # q carries the sign
            return math.copysign(self._root, scale), self._root
        return fp32(scale), fp32(scale)

    def cap_slope(self, keys: slice, rows: slice) -> Tensor | None:
        """Derivative of the cap, 1 - tanh^2, of a tile; None without a cap."""
        if self.problem.softcap is None:
            return None
        exact = self._product(keys, rows).double()
        exact = exact * self._scale if self._multiplied else exact
        t = functions.tanh((exact / fp32(self.problem.softcap)).float(), self.machine)
        return 1.0 - t * t


def finite_reference(m: Tensor) -> Tensor:
    """The maximum to subtract: 0 where no key has been seen, which avoids -inf minus -inf."""
    return torch.where(torch.isneginf(m), 0.0, m)


def _part(x: Tensor, rows: slice, keys: slice) -> Tensor:
    """Rows and keys of a tensor that may broadcast over either."""
    if x.shape[2] != 1:
        x = x[:, :, rows]
    return x[..., keys] if x.shape[3] != 1 else x
