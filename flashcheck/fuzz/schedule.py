"""Which problems the next shard draws: where new behaviour is expected per second of work."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any


class Scheduler:
    """Chooses a dtype for each shard: every one once, then by yield, with a bonus for the neglected.

    Yield is what a case line adds (new labels, records of the margin, new failures) per second. The rule
    is UCB1 (Auer, Cesa-Bianchi and Fischer, 2002) on yields scaled to the largest one.
    """

    def __init__(self, dtypes: tuple[str, ...]) -> None:
        self.dtypes = dtypes
        self._chosen: Counter[str] = Counter()
        self._gain: Counter[str] = Counter()
        self._seconds: Counter[str] = Counter()

    def saw(self, line: dict[str, Any]) -> None:
        dtype = line["dtype"]
        gain = len(line.get("covered", ())) + len(line.get("margins", {})) + 10 * ("group" in line)
        self._gain[dtype] += gain
        self._seconds[dtype] += sum(line["seconds"].values())

    def choose(self, number: int) -> str:
        """The dtype of shard ``number``."""
        waiting = [d for d in self.dtypes if not self._chosen[d]]
        if waiting:
            dtype = waiting[number % len(waiting)]
        else:
            yields = {d: self._gain[d] / max(self._seconds[d], 1e-3) for d in self.dtypes}
            top = max(yields.values()) or 1.0
            rounds = sum(self._chosen.values())
            dtype = max(
                self.dtypes,
                key=lambda d: yields[d] / top + math.sqrt(2 * math.log(rounds) / self._chosen[d]),
            )
        self._chosen[dtype] += 1
        return dtype
