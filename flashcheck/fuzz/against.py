"""Differential mode: the same cases on two kernels; is the new one ever worse, and where.

Both errors are divided by the *new* kernel's bound, so that the numbers compare; the regions are the
features of the problems (options, edges of tiles, head dims, values).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from flashcheck.checks.judged import Judged, KernelError
from flashcheck.checks.measure import Measured, measure
from flashcheck.fuzz.case import FuzzCase
from flashcheck.fuzz.hunter import features_of
from flashcheck.kernel import Kernel

FEWEST_CASES = 5
"""Cases below which a region is not ranked."""

_FLOOR = 2.0**-20


def compared(judged: Judged, other: Kernel) -> dict[str, tuple[float, float, float]]:
    """Tensor -> (worst margin, the other's worst margin, log2 of the ratio of their rms errors).

    Empty where one of them has no answer: that is the business of the checks.
    """
    if not judged.answers() or other.capabilities.refuses(judged.problem) is not None:
        return {}
    try:
        result = Judged(other, judged.problem, str(judged.device)).result
    except KernelError:
        return {}
    live = ~judged.empty_rows
    pairs = {"O": (judged.measured["O"], measure("O", result.out, judged.bound.out, live))}
    if result.lse is not None and "LSE" in judged.measured:
        pairs["LSE"] = (judged.measured["LSE"], measure("LSE", result.lse, judged.bound.lse, live))
    numbers = {}
    for tensor, (new, old) in pairs.items():
        if new.worst is not None and old.worst is not None:
            growth = math.log2((_rms(judged, tensor, new) + _FLOOR) / (_rms(judged, tensor, old) + _FLOOR))
            numbers[tensor] = (new.worst.margin, old.worst.margin, growth)
    return numbers


def _rms(judged: Judged, tensor: str, measured: Measured) -> float:
    """Root mean square of |error| / bound over the elements that have a finite one."""
    interval = (judged.bound.out if tensor == "O" else judged.bound.lse).interval
    share = (measured.got - interval.exact).abs() / interval.bound
    share = share[torch.isfinite(share)]
    return float(share.square().mean().sqrt()) if share.numel() else 0.0


@dataclass(slots=True)
class Region:
    """Cases that share a feature.

    Attributes:
        cases: how many; worse: those whose worst margin is larger than the other's.
        growth: mean of log2(rms error / the other's); deviation: its standard error.
        largest: worst margin, the other's on the same problem, and that problem, where they differ most.
    """

    dtype: str
    tensor: str
    feature: str
    cases: int = 0
    worse: int = 0
    growth: float = 0.0
    squares: float = 0.0
    largest: tuple[float, float, dict[str, Any] | None] = (0.0, 0.0, None)

    def add(self, new: float, old: float, growth: float, case: dict[str, Any]) -> None:
        self.cases += 1
        self.worse += new > old
        step = growth - self.growth
        self.growth += step / self.cases
        self.squares += step * (growth - self.growth)
        if new - old > self.largest[0] - self.largest[1] or self.largest[2] is None:
            self.largest = new, old, case

    @property
    def deviation(self) -> float:
        return math.sqrt(self.squares / self.cases / max(1, self.cases - 1))


def regions(lines: Iterable[dict[str, Any]]) -> list[Region]:
    """Regions of a campaign's case lines, those whose error grew most first (2 standard errors off)."""
    found: dict[tuple[str, str, str], Region] = {}
    for line in lines:
        for tensor, numbers in line.get("against", {}).items():
            case = FuzzCase.from_json(line["case"])
            for feature in ("all", *features_of(case.spec)):
                key = (line["dtype"], tensor, feature)
                region = found.setdefault(key, Region(*key))
                new, old, growth = numbers
                region.add(new, old, growth, line["case"])
    ranked = [r for r in found.values() if r.cases >= FEWEST_CASES]
    return sorted(ranked, key=lambda r: r.growth - 2 * r.deviation, reverse=True)


def by_tensor(found: Iterable[Region]) -> dict[tuple[str, str], list[Region]]:
    grouped: dict[tuple[str, str], list[Region]] = defaultdict(list)
    for region in found:
        grouped[region.dtype, region.tensor].append(region)
    return grouped
