"""Which tiling explains the bits: the centred bound (tier C) tried under every candidate.

The roundings of P depend on the maximum that each key tile is taken against, so tile size and visiting
order show in the last bits of the output. A candidate is explained where no element lies outside its
centred interval; wrong ones miss many. THEORY.md section 10.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from flashcheck.arithmetic import Arithmetic, Machine, Order
from flashcheck.bounds import centred
from flashcheck.bounds.forward import forward_bound
from flashcheck.oracle.quantities import ForwardQuantities
from flashcheck.problem import Problem

BLOCKS = (16, 32, 48, 64, 80, 96, 128, 192, 256, 512)
ORDERS: tuple[Order, ...] = ("ascending", "descending")


@dataclass(frozen=True, slots=True, order=True)
class Tiling:
    """A candidate. ``block_keys`` None: the whole row at once."""

    block_keys: int | None
    order: Order

    def describe(self) -> str:
        """``64 keys, descending``."""
        return "whole rows" if self.block_keys is None else f"{self.block_keys} keys, {self.order}"


WHOLE = Tiling(None, "ascending")
CANDIDATES = (*(Tiling(block, order) for block in BLOCKS for order in ORDERS), WHOLE)


def can_identify(arithmetic: Arithmetic) -> bool:
    """The roundings of P would be predicted if the tiling were known, and are coarse enough to show."""
    sample = replace(arithmetic, block_keys=64, order="ascending")
    narrow = arithmetic.probability_format.precision <= 11
    return narrow and not arithmetic.tiling_known and centred.forward_applies(sample)


@dataclass(slots=True)
class TilingTally:
    """Elements that lie outside each candidate's centred interval, over several problems.

    Attributes:
        outside: by candidate. elements: judged. problems: that told candidates apart.
    """

    outside: Counter[Tiling] = field(default_factory=Counter)
    elements: int = 0
    problems: int = 0

    def add(
        self,
        problem: Problem,
        exact: ForwardQuantities,
        got: Tensor,
        arithmetic: Arithmetic,
        machine: Machine,
    ) -> None:
        """Tries every candidate on one problem: ``got`` (B, H, Nq, dv) is the kernel's output."""
        live = exact.visible.any(-1, keepdim=True).expand(got.shape)
        misses: dict[int | None, dict[Order, int]] = {}
        for candidate in CANDIDATES:
            block = candidate.block_keys
            if block is None or block >= problem.num_keys:
                block = None  # one tile: all of these are the same
            known = misses.setdefault(block, {})
            if candidate.order not in known:
                if block is None and known:
                    known[candidate.order] = next(iter(known.values()))
                else:
                    known[candidate.order] = _misses(
                        problem, exact, got, live, arithmetic, machine, Tiling(block, candidate.order)
                    )
            self.outside[candidate] += known[candidate.order]
        self.elements += int(live.sum())
        self.problems += 1

    @property
    def explained(self) -> tuple[Tiling, ...]:
        """Candidates that no element contradicts, smallest tile first."""
        if not self.problems:
            return ()
        return tuple(c for c in CANDIDATES if not self.outside[c])

    def describe(self) -> str:
        """One line for a person: what explains the bits, or the few that do not."""
        if not self.problems:
            return "no problem tells tilings apart"
        others = [c for c in CANDIDATES if self.outside[c]]
        if not self.explained:
            best = min(CANDIDATES, key=lambda c: self.outside[c])
            return (
                f"no candidate explains the bits; {best.describe()} comes closest, "
                f"{self.outside[best]:,} of {self.elements:,} elements differ"
            )
        if not others:
            return f"every candidate explains all {self.elements:,} elements"
        least = min(self.outside[c] for c in others)
        if len(others) < len(self.explained):
            names = " and ".join(c.describe() for c in others)
            return (
                f"every candidate but {names} explains all {self.elements:,} elements; "
                f"these miss {least:,} or more"
            )
        names = " or ".join(c.describe() for c in self.explained)
        return f"{names} explains all {self.elements:,} elements; the other candidates miss {least:,} or more"


def _misses(
    problem: Problem,
    exact: ForwardQuantities,
    got: Tensor,
    live: Tensor,
    arithmetic: Arithmetic,
    machine: Machine,
    tiling: Tiling,
) -> int:
    block = tiling.block_keys or max(problem.num_keys, 1)
    declared = replace(arithmetic, block_keys=block, order=tiling.order)
    interval = forward_bound(problem, exact, declared, machine).out.centred
    if interval is None:
        return 0
    return int((torch.where(live, interval.margin(got.double()), 0.0) > 1).sum())
