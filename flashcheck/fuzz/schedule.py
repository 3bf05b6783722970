"""Which problems the next shard draws: where new behaviour is expected per second of work.

An arm is a focus. Where kernels are compiled, arms are narrow: many cases for each signature that was paid
for. They are opened one by one, and compiled ahead of the first shard that runs there. Elsewhere an arm is a
whole dtype.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from typing import Any

from flashcheck.fuzz.signature import SLOW, Foci, Focus
from flashcheck.kernel import Capabilities

CASES_AN_ARM = 200
"""Judged for each open arm before a further one is opened: tens for each of its signatures."""

_FEWEST = 3
"""Signatures whose first call must have been seen to say whether a kernel is compiled."""

_FEWEST_CASES = 24
"""Cases that must have been judged to say whether arms spare any compiling."""


class Scheduler:
    """Chooses a focus for each shard: new ones first, then by yield, with a bonus for the neglected.

    Yield is what a case line adds (new labels, records of the margin, new failures) per second, compiling
    included. The rule is UCB1 (Auer, Cesa-Bianchi and Fischer, 2002) on yields scaled to the largest one.

    Args:
        compiled: True: each signature costs seconds; False: none does; None: to be seen from the first calls.
        workers: as many shards start at once: in arms of their own, so that nothing is compiled twice.
        arms: these and no others, where given.
    """

    def __init__(
        self,
        dtypes: tuple[str, ...],
        capabilities: Capabilities,
        *,
        compiled: bool | None = False,
        seed: int = 0,
        workers: int = 1,
        arms: tuple[Focus, ...] = (),
    ) -> None:
        self.dtypes = dtypes
        self._compiled = compiled
        self._workers = workers
        self._fixed = bool(arms)
        self._foci = Foci(random.Random(seed), capabilities, dtypes)
        self._arms = list(arms)
        self._whole = [Focus(d) for d in dtypes]
        self._chosen: Counter[Focus] = Counter()
        self._gain: Counter[Focus] = Counter()
        self._seconds: Counter[Focus] = Counter()
        self._of_shard: dict[int, Focus] = {}
        self._first_calls: dict[str, float] = {}
        self._ahead = 0
        self._cases = self._slow_cases = 0
        self._compiling = self._judging = 0.0

    @property
    def settled(self) -> bool:
        """Whether compiling is dear is known."""
        return self._compiled is not None or len(self._first_calls) >= _FEWEST

    @property
    def narrow(self) -> bool:
        """Shards keep to few signatures: compiling is dear, or nobody knows yet, and it spares compiling.

        Dear: half of the signatures' first calls were slow, whoever made them. What an earlier run has
        compiled is cheap now, and what it has not is found out: then this turns.
        """
        if not self._spared:
            return False
        if self._compiled is not None or not self.settled:
            return self._compiled is not False
        slow = sum(seconds > SLOW for seconds in self._first_calls.values())
        return 2 * slow >= len(self._first_calls)

    @property
    def _spared(self) -> bool:
        """Most cases are judged without compiling. Not so where a kernel is compiled for every shape: there
        an arm is as dear as everything, and holds less."""
        return self._cases < _FEWEST_CASES or 2 * self._slow_cases < self._cases

    def first_call(self, signature: str, seconds: float) -> None:
        """A kernel was called for a signature for the first time in some process."""
        self._first_calls[signature] = max(seconds, self._first_calls.get(signature, 0.0))

    def saw(self, line: dict[str, Any]) -> None:
        """A case line of any worker."""
        spent = line["seconds"]
        if "signature" in line:
            self.first_call(line["signature"], spent.get("compile", 0.0))
        self._cases += 1
        self._slow_cases += spent.get("compile", 0.0) > SLOW
        self._compiling += spent.get("compile", 0.0)
        self._judging += sum(spent.values()) - spent.get("compile", 0.0)
        focus = self._of_shard.get(line["shard"])
        if focus is None:
            return
        gain = len(line.get("covered", ())) + len(line.get("margins", {})) + 10 * ("group" in line)
        self._gain[focus] += gain
        self._seconds[focus] += sum(spent.values())

    def due(self, helpers: bool) -> bool:
        """A further arm is worth its compilation: those there are were used. ``helpers``: others compile it,
        beforehand; without them no more of the workers' time goes there than into judging."""
        if not self.narrow or self._fixed:
            return False
        if helpers and not self.settled:
            return len(self._arms) + self._ahead < _FEWEST
        owed = CASES_AN_ARM * (len(self._arms) + self._ahead - self._workers + (not helpers))
        return self._cases >= owed and (helpers or self._compiling <= self._judging)

    def propose(self) -> Focus:
        """What becomes a further arm once helpers have compiled it: ``open`` it then."""
        self._ahead += 1
        return self._foci.next()

    def open(self, focus: Focus) -> None:
        """Opens an arm that was proposed."""
        self._ahead -= 1
        self._arms.append(focus)

    def choose(self, number: int, helpers: bool = False) -> Focus:
        """The focus of shard ``number``. Opens a further arm where one is due and no ``helpers`` do so, and
        at first one for each worker: then there is nothing else to do."""
        if self.narrow and not self._fixed:
            starting = len(self._arms) < self._workers and all(self._chosen[f] for f in self._arms)
            if starting or (not helpers and self.due(helpers)):
                self._arms.append(self._foci.next())
        arms = self._arms if self.narrow or self._fixed else self._whole
        waiting = [f for f in arms if not self._chosen[f]]
        first = number % max(1, len(waiting)) if arms is self._whole else 0
        focus = waiting[first] if waiting else self._best(arms)
        self._chosen[focus] += 1
        self._of_shard[number] = focus
        return focus

    def _best(self, arms: list[Focus]) -> Focus:
        rounds = sum(self._chosen[f] for f in arms)
        yields = {f: self._gain[f] / max(self._seconds[f], 1e-3) for f in arms}
        top = max(yields.values()) or 1.0
        return max(arms, key=lambda f: yields[f] / top + math.sqrt(2 * math.log(rounds) / self._chosen[f]))
