"""The exact answer to a golden problem: by balls, at a precision at which every digit is decided."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flashcheck.formats import FP32, Format, to_float64
from flashcheck.golden.entry import Entry, output_format
from flashcheck.golden.patterns import from_patterns
from flashcheck.golden.rounding import PATTERNS, Span, UndecidedError, decimal, pattern
from flashcheck.oracle import arb, fp64
from flashcheck.oracle.exact import working_bits
from flashcheck.problem import Problem

FIRST_EXTRA_BITS = 128
MOST_BITS = 8192
"""A ball that still contains a rounding boundary at this precision is taken to lie on it; one that contains
0 and is below 2^-4096 is taken to be 0. Such values come from ties and cancellations that are exact."""

GRADIENTS = ("dq", "dk", "dv", "dbias", "dsink", "dscale")


@dataclass(frozen=True, slots=True)
class Tensors:
    """One expected tensor.

    Attributes:
        shape: () for a scalar.
        digits: one decimal string per element.
        patterns: format name -> one code per element.
    """

    shape: tuple[int, ...]
    digits: list[str]
    patterns: dict[str, list[int]]

    def tensor(self, fmt: Format) -> Tensor:
        """The values rounded into a format, as a tensor of its dtype."""
        return from_patterns(self.patterns[fmt.name], self.shape, fmt)


@dataclass(frozen=True, slots=True)
class Answer:
    """Expected tensors by name: out, lse, and the gradients conditional on their roundings.

    ``ties``: some value was decided as an exact tie or an exact 0 (``MOST_BITS``).
    """

    tensors: dict[str, Tensors]
    ties: bool


def answer(entry: Entry, extra_bits: int = FIRST_EXTRA_BITS) -> Answer:
    """The exact answer to an entry, tried first with ``extra_bits`` more than its scores need.

    Gradients are left out where O or LSE overflows the format that it is stored in.
    """
    problem = cleaned(entry.problem)
    forward, ties = _decided(extra_bits, problem, lambda bits: arb.forward(problem, bits), ("out", "lse"))
    if "NonFinite" in entry.flags:
        _overlay(entry.problem, forward)
    if problem.dout is None:
        return Answer(forward, ties)
    out, lse = stored_forward(entry.problem, forward)
    if not bool((torch.isfinite(lse) | (lse == -torch.inf)).all()) or not bool(torch.isfinite(out).all()):
        return Answer(forward, ties)  # nothing to differentiate from: what is stored has overflowed
    backward, more = _decided(
        extra_bits, problem, lambda bits: arb.backward(problem, out, lse, bits), GRADIENTS
    )
    return Answer(forward | backward, ties or more)


def stored_forward(problem: Problem, tensors: dict[str, Tensors]) -> tuple[Tensor, Tensor]:
    """O in the output format and LSE in fp32: what the backward reads."""
    return tensors["out"].tensor(output_format(problem.format)), tensors["lse"].tensor(FP32)


def cleaned(problem: Problem) -> Problem:
    """The problem with 0 in place of NaN and inf."""

    def finite(x: Tensor) -> Tensor:
        wide = to_float64(x)
        return torch.where(torch.isfinite(wide), wide, 0.0).to(x.dtype)

    return problem.replaced(q=finite(problem.q), k=finite(problem.k), v=finite(problem.v))


def shape_of(problem: Problem, name: str) -> tuple[int, ...]:
    """Shape of an expected tensor."""
    rows = (problem.batch, problem.num_heads, problem.num_queries)
    shapes: dict[str, tuple[int, ...]] = {
        "out": (*rows, problem.value_dim),
        "lse": rows,
        "dq": tuple(problem.q.shape),
        "dk": tuple(problem.k.shape),
        "dv": tuple(problem.v.shape),
        "dbias": () if problem.bias is None else tuple(problem.bias.shape),
        "dsink": (problem.num_heads,),
        "dscale": (),
    }
    return shapes[name]


def flat(values: Any) -> Iterator[Any]:
    """Leaves of nested lists, in order."""
    if isinstance(values, list):
        for x in values:
            yield from flat(x)
    else:
        yield values


def _decided(
    extra_bits: int, problem: Problem, compute: Any, names: tuple[str, ...]
) -> tuple[dict[str, Tensors], bool]:
    """Named tensors of ``compute(bits)`` at the first precision that decides all of them."""
    bits = working_bits(problem) + extra_bits
    while True:
        balls = compute(bits)
        last = bits >= MOST_BITS
        try:
            return {
                name: _rounded(shape_of(problem, name), getattr(balls, name), last)
                for name in names
                if getattr(balls, name) is not None
            }, last
        except UndecidedError:
            if last:
                raise
            bits = min(4 * bits, MOST_BITS)


def _rounded(shape: tuple[int, ...], balls: Any, last: bool) -> Tensors:
    spans = [_span(ball, last) for ball in flat(balls)]
    return Tensors(
        shape,
        [decimal(span) for span in spans],
        {fmt.name: [pattern(span, fmt) for span in spans] for fmt in PATTERNS},
    )


def _span(ball: Any, last: bool) -> Span:
    if last and ball.is_finite() and ball.contains(0) and abs(ball).upper() < type(ball)(2) ** -4096:
        return Span.of(type(ball)(0))
    return Span.of(ball, last)


def _overlay(problem: Problem, forward: dict[str, Tensors]) -> None:
    """Replace what NaN and inf reach, by IEEE rules in float64 (fp64.py)."""
    exact = fp64.forward(problem)
    for name, values in (("out", exact.out), ("lse", exact.lse)):
        tensors = forward[name]
        for n, x in enumerate(values.flatten().tolist()):
            if x - x == 0 or (name == "lse" and x == -torch.inf and not _sees_poison(problem)):
                continue
            special = Span(0, 0, 0, "nan" if math.isnan(x) else ("inf" if x > 0 else "-inf"), None)
            tensors.digits[n] = decimal(special)
            for fmt in PATTERNS:
                tensors.patterns[fmt.name][n] = pattern(special, fmt)


def _sees_poison(problem: Problem) -> bool:
    return not all(bool(torch.isfinite(to_float64(x)).all()) for x in (problem.q, problem.k, problem.v))
