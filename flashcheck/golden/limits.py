"""Bounds of a golden problem under the named arithmetics, as codes of one format.

A code is a bf16 number: the largest |stored - exact| that the arithmetic can produce, rounded up to six
significant bits so that every build of torch gives the same one. The sign bit says that NaN and infinities
are legal as well, because the computation may leave the range of fp32 on the way.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from flashcheck.arithmetic import ARITHMETICS, HOPPER, IEEE, Arithmetic, Machine
from flashcheck.bounds.backward import backward_bound
from flashcheck.bounds.forward import forward_bound
from flashcheck.bounds.pairs import Given
from flashcheck.bounds.result import BackwardBound, TensorBound
from flashcheck.checks.reference import backward_reference, forward_reference
from flashcheck.formats import BF16, FP32, Format
from flashcheck.golden.answer import Tensors, stored_forward
from flashcheck.golden.patterns import to_patterns
from flashcheck.oracle import fp64
from flashcheck.oracle.quantities import BackwardQuantities
from flashcheck.problem import Problem

KEPT_BITS = 6
NONFINITE_LEGAL = 0x8000

_REFINEMENTS = {
    "block_keys": None,
    "block_queries": None,
    "order": "unknown",
    "atomic_dq": False,
    "grad_score_format": None,
}
"""What a kernel may declare on top of a named arithmetic: bounds that leave it open hold for it too."""


@dataclass(frozen=True, slots=True)
class Named:
    """A named arithmetic on a machine.

    Attributes:
        name: such as ``flash.bf16.hopper``.
        variants: kernels of any of these are covered; the bound is the largest of theirs.
    """

    name: str
    variants: tuple[Arithmetic, ...]
    machine: Machine

    def covers(self, arithmetic: Arithmetic, machine: Machine) -> bool:
        """True where a kernel that declares this on that machine is judged by these bounds."""
        if replace(machine, name=self.machine.name) != self.machine:
            return False
        probability = arithmetic.grad_score_format in (None, arithmetic.probability_format)
        coarse = replace(arithmetic, **_REFINEMENTS)  # type: ignore[arg-type]
        return probability and coarse in self.variants


def named_arithmetics(fmt: Format) -> list[Named]:
    """The named arithmetics whose inputs have this format."""
    flash = ARITHMETICS[f"flash.{fmt}"]
    placements = ("exponent_fma", "exponent_subtract_first", "scores")
    variants = tuple(replace(flash, scale_placement=x) for x in placements)  # type: ignore[arg-type]
    found = [
        Named(f"flash.{fmt}", variants, IEEE),
        Named(f"flash.{fmt}.hopper", variants, HOPPER),
    ]
    if (eager := ARITHMETICS.get(f"eager.{fmt}")) is not None:
        found.append(Named(f"eager.{fmt}", (eager,), IEEE))
    return found


def bounds(problem: Problem, tensors: dict[str, Tensors]) -> dict[str, dict[str, list[int]]]:
    """Named arithmetic -> tensor -> one code per element."""
    return {named.name: _of(problem, tensors, named) for named in named_arithmetics(problem.format)}


def _of(problem: Problem, tensors: dict[str, Tensors], named: Named) -> dict[str, list[int]]:
    largest: dict[str, Tensor] = {}
    legal: dict[str, Tensor] = {}
    for arithmetic in named.variants:
        for name, bound in tensor_bounds(problem, tensors, arithmetic, named.machine):
            size = bound.interval.bound + 2.0**-52 * bound.interval.exact.abs().nan_to_num(0.0, 0.0, 0.0)
            size = torch.where(bound.interval.bound == 0, 0.0, size)
            largest[name] = torch.maximum(largest.get(name, size), size)
            legal[name] = legal.get(name, bound.interval.may_overflow) | bound.interval.may_overflow
    return {name: codes(x, legal[name]) for name, x in largest.items()}


def tensor_bounds(
    problem: Problem, tensors: dict[str, Tensors], arithmetic: Arithmetic, machine: Machine
) -> Iterator[tuple[str, TensorBound]]:
    """(name, bound) of O, LSE and, where there is an output gradient, of the gradients."""
    low = fp64.forward(problem)
    forward = forward_bound(problem, low, arithmetic, machine)
    reference = forward_reference(problem, low, forward, None)
    if reference.climbed:
        forward = forward_bound(problem, reference.quantities, arithmetic, machine)
    yield "out", forward.out
    yield "lse", forward.lse
    if "dq" not in tensors or arithmetic.keeps_probabilities:
        return  # an eager backward reads its own P, not what is stored
    out, lse = stored_forward(problem, tensors)
    exact, quantities = fp64.backward(problem, out, lse), reference.quantities

    def bound_of(gradients: BackwardQuantities) -> BackwardBound:
        given = Given(out, lse)
        return backward_bound(
            problem, quantities, gradients, given, arithmetic, machine, forward.scores, with_scale=True
        )

    served = backward_reference(problem, quantities, exact, bound_of, {}, (out, lse))
    yield from served.bound.tensors.items()


def codes(bound: Tensor, legal: Tensor) -> list[int]:
    """Codes of bounds, rounded up."""
    result = []
    for x, nonfinite in zip(bound.flatten().tolist(), legal.expand_as(bound).flatten().tolist(), strict=True):
        up = torch.tensor(_rounded_up(x), dtype=torch.float64).to(BF16.dtype)
        result.append(to_patterns(up, BF16)[0] | (NONFINITE_LEGAL if nonfinite else 0))
    return result


def _rounded_up(x: float) -> float:
    """The smallest number of ``KEPT_BITS`` significant bits that is at least x; inf past bf16's range."""
    if x == 0 or not math.isfinite(x):
        return 0.0 if x == 0 else math.inf
    exponent = max(math.frexp(x)[1] - KEPT_BITS, BF16.min_exponent - BF16.precision + 1)
    up = math.ldexp(math.ceil(math.ldexp(x, -exponent)), exponent)
    return up if up <= BF16.max_finite else math.inf


def decoded(words: list[int]) -> tuple[Tensor, Tensor]:
    """(bounds in float64, where NaN and infinities are legal) of codes."""
    code = torch.tensor(words, dtype=torch.int32)
    bound = ((code & ~NONFINITE_LEGAL) << 16).view(FP32.dtype).double()
    return bound, (code & NONFINITE_LEGAL) != 0
