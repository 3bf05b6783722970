"""Which problems the next shard draws: where new behaviour is expected per second of work.

An arm is a focus. Where kernels are compiled, arms are narrow and are opened one by one: k shards are
spread over some sqrt(2 k) of them, so that what was compiled is used and the space is covered in the end.
Elsewhere an arm is a whole dtype.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from typing import Any

from flashcheck.fuzz.signature import Focus, draw_focus
from flashcheck.kernel import Capabilities


class Scheduler:
    """Chooses a focus for each shard: new ones first, then by yield, with a bonus for the neglected.

    Yield is what a case line adds (new labels, records of the margin, new failures) per second, compiling
    included. The rule is UCB1 (Auer, Cesa-Bianchi and Fischer, 2002) on yields scaled to the largest one.
    """

    def __init__(
        self, dtypes: tuple[str, ...], capabilities: Capabilities, *, compiled: bool = False, seed: int = 0
    ) -> None:
        self.dtypes = dtypes
        self._capabilities = capabilities
        self._compiled = compiled
        self._rng = random.Random(seed)
        self._arms = [Focus(d) for d in dtypes] if not compiled else []
        self._chosen: Counter[Focus] = Counter()
        self._gain: Counter[Focus] = Counter()
        self._seconds: Counter[Focus] = Counter()
        self._of_shard: dict[int, Focus] = {}

    def saw(self, line: dict[str, Any]) -> None:
        focus = self._of_shard.get(line["shard"])
        if focus is None:
            return
        gain = len(line.get("covered", ())) + len(line.get("margins", {})) + 10 * ("group" in line)
        self._gain[focus] += gain
        self._seconds[focus] += sum(line["seconds"].values())

    def choose(self, number: int) -> Focus:
        """The focus of shard ``number``."""
        rounds = sum(self._chosen.values())
        if self._compiled and len(self._arms) <= math.isqrt(2 * rounds):
            turn = (self.dtypes[len(self._arms) % len(self.dtypes)],)
            self._arms.append(draw_focus(self._rng, self._capabilities, turn))
        waiting = [f for f in self._arms if not self._chosen[f]]
        if waiting:
            focus = waiting[0 if self._compiled else number % len(waiting)]
        else:
            yields = {f: self._gain[f] / max(self._seconds[f], 1e-3) for f in self._arms}
            top = max(yields.values()) or 1.0
            focus = max(
                self._arms,
                key=lambda f: yields[f] / top + math.sqrt(2 * math.log(max(rounds, 1)) / self._chosen[f]),
            )
        self._chosen[focus] += 1
        self._of_shard[number] = focus
        return focus
