"""Last rung and reference of record: attention in mpmath, one head at a time, by the definition.

Scalar loops that restate ``problem.py``'s header; nothing is shared with the vectorised rungs but the
mask predicate. A context of its own carries the precision, so no global mpmath setting changes.
gmpy2 makes it several times faster and is used by mpmath when present. Visible data must be finite.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from flashcheck.oracle.exact_backward import ExactBackward, backward
from flashcheck.oracle.mp_head import DIGITS, ExactForward, Head, to_tensor, working_bits
from flashcheck.oracle.quantities import ForwardQuantities
from flashcheck.problem import Problem

__all__ = [
    "DIGITS",
    "ExactBackward",
    "ExactForward",
    "backward",
    "forward",
    "forward_all",
    "to_tensor",
    "working_bits",
]


def forward(
    problem: Problem,
    b: int,
    h: int,
    rows: Iterable[int] | None = None,
    digits: int | None = None,
    *,
    bits: int | None = None,
) -> ExactForward:
    """Query rows ``rows`` (None: all) of head h in batch b; ``bits`` overrides the chosen precision."""
    bits = working_bits(problem, digits) if bits is None else bits
    rows = range(problem.num_queries) if rows is None else rows
    return Head(problem, b, h, rows, bits).forward()


def forward_all(
    problem: Problem,
    rows: Iterable[int] | None = None,
    digits: int | None = None,
    *,
    bits: int | None = None,
) -> ForwardQuantities:
    """Every head's query rows ``rows`` (None: all), rounded to float64."""
    rows = list(range(problem.num_queries) if rows is None else rows)
    heads = [
        [forward(problem, b, h, rows, digits, bits=bits) for h in range(problem.num_heads)]
        for b in range(problem.batch)
    ]

    def field(name: str, *tail: int) -> Tensor:
        values = to_tensor([[getattr(head, name) for head in batch] for batch in heads])
        return values.reshape(problem.batch, problem.num_heads, len(rows), *tail)

    n = problem.num_keys
    return ForwardQuantities(
        out=field("out", problem.value_dim),
        lse=field("lse"),
        products=field("products", n),
        scores=field("scores", n),
        probabilities=field("probabilities", n),
        row_max=field("row_max"),
        row_sum=field("row_sum"),
        visible=problem.visible(torch.tensor(rows, dtype=torch.int64)),
    )
