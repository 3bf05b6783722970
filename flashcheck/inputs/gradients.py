"""Output gradients by kind: what a backward is given besides normal numbers."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from flashcheck.errors import UnknownNameError
from flashcheck.formats import BF16, format_of
from flashcheck.oracle import fp64
from flashcheck.problem import Problem


def output_gradient(kind: str, problem: Problem) -> Tensor:
    """dO (batch, heads, Nq, value dim) of a kind, in the inputs' dtype (bf16 where that has 8 bits).

    Deterministic in the problem and its seed. Raises UnknownNameError for another kind.
    """
    if kind not in GRADIENT_KINDS:
        raise UnknownNameError("gradient", kind, GRADIENT_KINDS)
    shape = (problem.batch, problem.num_heads, problem.num_queries, problem.value_dim)
    generator = torch.Generator().manual_seed(problem.seed + 1)
    drawn = torch.randn(shape, generator=generator, dtype=torch.float64)
    made = GRADIENT_KINDS[kind](drawn, problem)
    fmt = problem.format if problem.q.element_size() > 1 else BF16
    return made.clamp(-format_of(fmt.dtype).max_finite, fmt.max_finite).to(fmt.dtype)


def _parallel(drawn: Tensor, problem: Problem) -> Tensor:
    """dO_i a multiple of O_i: rowsum(dO * O) is as large as it can be, and dP - delta cancels."""
    out = fp64.forward(problem).out.nan_to_num(0.0, 0.0, 0.0)
    return out * (1.0 + drawn[..., :1].abs())


def _orthogonal(drawn: Tensor, problem: Problem) -> Tensor:
    """dO_i orthogonal to O_i: rowsum(dO * O) is a rounding error."""
    out = fp64.forward(problem).out.nan_to_num(0.0, 0.0, 0.0)
    size = out.square().sum(-1, keepdim=True)
    along = (drawn * out).sum(-1, keepdim=True) / torch.where(size == 0, 1.0, size)
    return drawn - along.nan_to_num(0.0, 0.0, 0.0) * out


def _one_row(drawn: Tensor, problem: Problem) -> Tensor:
    """0 but in one row of every head, as the loss of a next-token model at one place."""
    kept = torch.zeros_like(drawn)
    if problem.num_queries:
        row = problem.seed % problem.num_queries
        kept[:, :, row] = drawn[:, :, row]
    return kept


GRADIENT_KINDS: dict[str, Callable[[Tensor, Problem], Tensor]] = {
    "normal": lambda drawn, problem: drawn,  # noqa: ARG005
    "tiny": lambda drawn, problem: drawn * 2.0**-12,  # noqa: ARG005
    "huge": lambda drawn, problem: drawn * 2.0**8,  # noqa: ARG005
    "parallel": _parallel,
    "orthogonal": _orthogonal,
    "ones": lambda drawn, problem: torch.ones_like(drawn),  # noqa: ARG005
    "one_row": _one_row,
}
"""tiny: as after the loss scale of a long sequence; ones: as ``sum().backward()`` gives."""
