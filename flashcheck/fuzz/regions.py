"""Where the error grew between two kernels: regions of the space of problems, ranked.

A region is a feature of the problems (options, edges of tiles, head dims, values).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from flashcheck.fuzz.case import FuzzCase
from flashcheck.fuzz.hunter import features_of

FEWEST_CASES = 5
"""Cases below which a region is not ranked."""


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
