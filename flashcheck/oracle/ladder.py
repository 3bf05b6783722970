"""The ladder, forward: float64 for every row, and a higher rung for the rows that need one.

A row is good enough when its rung's proved error is at most 1/64 of what the caller allows, element by
element: a verdict against an allowed error then moves by 1.6 % of it at most. No demand goes below the
2^-53 |value| that handing over float64 costs anyway. Rows are taken in blocks, so memory stays linear in
length as long as the caller keeps only outputs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from flashcheck.oracle import double_double, exact, fp64, own_error
from flashcheck.oracle.operands import operands
from flashcheck.oracle.own_error import ForwardError
from flashcheck.oracle.parts import finite_rows, part, row_blocks
from flashcheck.oracle.quantities import ForwardQuantities
from flashcheck.oracle.unit import DOUBLE_DOUBLE, FP64, MAX_BITS, multiprecision
from flashcheck.problem import Problem

RUNGS = ("fp64", "double-double", "exact")
"""Names of the values in ``rung`` tensors."""

FRACTION = 1.0 / 64.0

BLOCK_BYTES = 1 << 26

ROUNDING = 2.0**-53
"""Relative error of handing a rung's value over in float64."""

SMALLEST_DEMAND = 2.0**-890
"""Demands below this count as this: no rung's bound goes under 2^-900, where its evaluation underflows."""


@dataclass(frozen=True, slots=True)
class AllowedForward:
    """What the caller's bounds allow: out (B, H, Nq, dv), lse (B, H, Nq); inf asks for nothing."""

    out: Tensor
    lse: Tensor

    def rows(self, rows: Tensor) -> AllowedForward:
        return AllowedForward(self.out[:, :, rows], self.lse[:, :, rows])


@dataclass(frozen=True, slots=True)
class ServedForward:
    """Rows as the ladder serves them; R rows.

    Attributes:
        quantities: float64 values, each row from its rung.
        out_error: (B, H, R, dv), lse_error: (B, H, R): proved bounds on |served - exact|, the final
            rounding to float64 included; inf where visible data is not finite.
        rung: (B, H, R) index into ``RUNGS``.
        resolved: (B, H, R) False where even the last rung cannot prove the allowed error.
    """

    quantities: ForwardQuantities
    out_error: Tensor
    lse_error: Tensor
    rung: Tensor
    resolved: Tensor


@dataclass(frozen=True, slots=True)
class Outputs:
    """The linear-size part of ``ServedForward`` for all rows."""

    out: Tensor
    lse: Tensor
    out_error: Tensor
    lse_error: Tensor
    rung: Tensor
    resolved: Tensor


def forward(problem: Problem, allowed: AllowedForward, block_bytes: int = BLOCK_BYTES) -> Outputs:
    """Output and log-sum-exp of every row, in memory linear in length."""
    served = [
        Outputs(s.quantities.out, s.quantities.lse, s.out_error, s.lse_error, s.rung, s.resolved)
        for _, s in blocks(problem, allowed, block_bytes)
    ]
    if not served:
        rows = torch.arange(0)
        s = forward_rows(problem, allowed, rows)
        return Outputs(s.quantities.out, s.quantities.lse, s.out_error, s.lse_error, s.rung, s.resolved)
    return Outputs(**{f.name: torch.cat([getattr(s, f.name) for s in served], 2) for f in fields(Outputs)})


def blocks(
    problem: Problem, allowed: AllowedForward, block_bytes: int = BLOCK_BYTES
) -> Iterator[tuple[Tensor, ServedForward]]:
    """(rows, served) for consecutive row blocks; only one block's quadratic tensors exist at a time."""
    if problem.num_queries == 0:
        return
    for rows in row_blocks(problem, problem.batch * problem.num_heads, block_bytes):
        yield rows, forward_rows(problem, allowed.rows(rows), rows)


def forward_rows(problem: Problem, allowed: AllowedForward, rows: Tensor) -> ServedForward:
    """Rows ``rows`` of every head, each from the lowest rung that is good enough.

    Args:
        allowed: for these rows: out (B, H, R, dv), lse (B, H, R).
    """
    low = fp64.forward(problem, rows)
    error = own_error.forward_error(problem, low, FP64, rows)
    judged = finite_rows(problem, operands(problem, rows))
    served = ServedForward(
        quantities=_writable(low),
        out_error=torch.where(judged.unsqueeze(-1), error.out, torch.inf),
        lse_error=torch.where(judged, error.lse, torch.inf),
        rung=torch.zeros(judged.shape, dtype=torch.int8),
        resolved=torch.ones_like(judged),
    )
    climbing = judged & ~_good_enough(low, error, allowed)
    for b, h in climbing.any(-1).nonzero().tolist():
        place = (b, h, climbing[b, h].nonzero().squeeze(-1))
        _climb(problem, served, allowed, rows, place=place)
    return served


def demand(allowed: Tensor, value: Tensor) -> Tensor:
    """The largest error of a rung that is good enough for ``allowed``."""
    floor = value.abs().nan_to_num_(0.0, 0.0).mul_(ROUNDING)
    return torch.maximum(FRACTION * allowed, floor).clamp(min=SMALLEST_DEMAND)


def _good_enough(got: ForwardQuantities, error: ForwardError, allowed: AllowedForward) -> Tensor:
    """(B, H, R)."""
    out = (error.out <= demand(allowed.out, got.out)).all(-1)
    return out & (error.lse <= demand(allowed.lse, got.lse))


def _climb(
    problem: Problem,
    served: ServedForward,
    allowed: AllowedForward,
    rows: Tensor,
    *,
    place: tuple[int, int, Tensor],
) -> None:
    """Serve the rows ``place`` = (b, h, indices into ``rows``) from a higher rung."""
    b, h, at = place
    head = part(problem, b, slice(h, h + 1))
    wanted = AllowedForward(allowed.out[b : b + 1, h : h + 1, at], allowed.lse[b : b + 1, h : h + 1, at])
    got = double_double.forward(head, rows[at]).rounded()
    error = own_error.forward_error(head, got, DOUBLE_DOUBLE, rows[at])
    good = _good_enough(got, error, wanted)
    _serve(served, got, error, place=place, rung=1)
    last = (~good[0, 0]).nonzero().squeeze(-1)
    if len(last):
        got, error, proved = _exact(head, rows[at[last]], wanted.rows(last))
        _serve(served, got, error, place=(b, h, at[last]), rung=2)
        served.resolved[b, h, at[last]] = proved[0, 0]


def _exact(
    head: Problem, rows: Tensor, wanted: AllowedForward
) -> tuple[ForwardQuantities, ForwardError, Tensor]:
    """Rows of one head by mpmath, at a precision that is raised once if the proof asks for it."""
    bits = exact.working_bits(head)
    while True:
        got = exact.forward_all(head, rows.tolist(), bits=bits)
        error = own_error.forward_error(head, got, multiprecision(bits), rows)
        missing = missing_bits(
            (error.out, demand(wanted.out, got.out)), (error.lse, demand(wanted.lse, got.lse))
        )
        if missing == 0 or bits >= MAX_BITS:
            return got, error, _good_enough(got, error, wanted)
        bits = min(bits + missing, MAX_BITS)


def missing_bits(*pairs: tuple[Tensor, Tensor]) -> int:
    """By how many bits (error, demand) pairs miss; 0 when all are met."""
    worst = max(float((error / limit).max()) if error.numel() else 0.0 for error, limit in pairs)
    if worst <= 1.0:
        return 0
    return MAX_BITS if math.isinf(worst) else math.ceil(math.log2(worst)) + 4


def _writable(low: ForwardQuantities) -> ForwardQuantities:
    """A copy of every tensor: some are expanded, or are one another where a problem is small."""
    copies = {field.name: getattr(low, field.name).clone() for field in fields(ForwardQuantities)}
    return ForwardQuantities(**{k: v.contiguous() for k, v in copies.items()})


def _serve(
    served: ServedForward,
    got: ForwardQuantities,
    error: ForwardError,
    *,
    place: tuple[int, int, Tensor],
    rung: int,
) -> None:
    b, h, at = place
    for field in fields(ForwardQuantities):
        getattr(served.quantities, field.name)[b, h, at] = getattr(got, field.name)[0, 0]
    finite_lse = torch.where(torch.isfinite(got.lse), got.lse.abs(), 0.0)
    served.out_error[b, h, at] = (error.out + ROUNDING * got.out.abs())[0, 0]
    served.lse_error[b, h, at] = (error.lse + ROUNDING * finite_lse)[0, 0]
    served.rung[b, h, at] = rung
