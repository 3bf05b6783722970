"""Statistics of a campaign: rms, bias and score tests over problems that no search has touched.

A search climbs toward large errors, and keeps copies of what it liked: a mean over its cases is a mean over
chance. So every shard judges some problems of ordinary values that follow from its seed alone; their sums
stand in the case lines, and a verdict is made of all of them.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from flashcheck.bounds.score_tests import ScoreSums
from flashcheck.checks import CHECKS, Judged
from flashcheck.checks.bias import BiasTally
from flashcheck.checks.record import Record, Status
from flashcheck.checks.rms import RmsTally
from flashcheck.checks.score_tests import ScoreTally
from flashcheck.fuzz.case import FuzzCase
from flashcheck.fuzz.signature import Focus
from flashcheck.inputs.combinations import is_legal
from flashcheck.inputs.problems import Wishes, draw_spec
from flashcheck.inputs.values import FAMILIES
from flashcheck.kernel import Capabilities

ONE_IN = 8
"""Share of a shard's cases that are drawn for the statistics."""

LARGEST = 129
"""Lengths, as those of the search."""

ORDINARY = tuple(name for name, family in FAMILIES.items() if "ordinary" in family.properties)

GROUP_CHECKS = tuple(name for name, check in CHECKS.items() if check.grouped)
"""Verdicts over many problems: one problem alone, found by a search, proves nothing about a mean."""

SUMS = "statistics"
"""Among a case's checks: its sums are wanted, for those verdicts."""

TENSORS = ("O", "dQ", "dK", "dV")


def sampled(
    focus: Focus, capabilities: Capabilities, checks: tuple[str, ...], seed: int, count: int
) -> Iterator[FuzzCase]:
    """So many cases of ordinary values inside a focus; a function of the arguments."""
    rng = random.Random(seed)
    narrow = focus.narrowed(capabilities)
    drawn = tries = 0
    while drawn < count and tries < 50 * count:
        tries += 1
        spec = draw_spec(rng, narrow, focus.dtype, rng.randrange(2**31), Wishes(family=rng.choice(ORDINARY)))
        spec = focus.kept(spec)
        fits = spec.gradient == "normal" and max(spec.num_queries, spec.num_keys) <= LARGEST
        if fits and is_legal(spec, capabilities):
            drawn += 1
            yield FuzzCase(spec, (*checks, SUMS))


@dataclass(slots=True)
class TensorStatistics:
    """Sums for one tensor, over problems whose prediction is sharp enough to reject by."""

    rms: RmsTally = field(default_factory=RmsTally)
    bias: BiasTally = field(default_factory=BiasTally)
    scores: dict[str, ScoreTally] = field(default_factory=dict)

    def verdicts(self, tensor: str, group: str) -> list[Record]:
        """One record a check."""
        scores = [tally.verdict(direction, group) for direction, tally in sorted(self.scores.items())]
        return [self.rms.verdict(tensor, group), self.bias.verdict(tensor, group), *scores]

    @property
    def judged(self) -> bool:
        """Enough was added for a verdict on the rms error."""
        return self.rms.judges

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def add(self, data: dict[str, Any]) -> None:
        """Adds what ``to_json`` of another gave."""
        _plus(self.rms, data["rms"])
        _plus(self.bias, data["bias"])
        for direction, sums in data["scores"].items():
            _plus(self.scores.setdefault(direction, ScoreTally()), sums)


def _plus(tally: RmsTally | BiasTally | ScoreTally, more: dict[str, Any]) -> None:
    for f in fields(tally):
        mine, other = getattr(tally, f.name), more[f.name]
        if isinstance(mine, tuple):
            setattr(tally, f.name, tuple(a + b for a, b in zip(mine, other, strict=True)))
        else:
            setattr(tally, f.name, mine + other)


def statistics_of(judged: Judged, backward: bool) -> dict[str, dict[str, Any]]:
    """Tensor -> sums as JSON of one problem.

    Left out are tensors on which nothing is predictable, and those outside their bound: such a failure is a
    finding alone, and would make every mean one too.
    """
    measured = dict(judged.measured)
    if backward and judged.backward_defined and judged.differentiates():
        measured |= judged.measured_gradients
    found: dict[str, dict[str, Any]] = {}
    for tensor in TENSORS:
        one = measured.get(tensor)
        if one is None or not one.gates or one.over:
            continue
        sums = TensorStatistics()
        sums.rms.add(one)
        sums.bias.add(one)
        scores: dict[str, ScoreSums] = judged.score_sums if tensor == "O" else {}
        for direction, projections in scores.items():
            sums.scores[direction] = ScoreTally()
            sums.scores[direction].add(projections)
        found[tensor] = sums.to_json()
    return found


def failed_statistics(
    statistics: dict[tuple[str, str], TensorStatistics],
) -> list[tuple[str, str, Record]]:
    """(dtype, tensor, record) of every verdict that rejects."""
    return [
        (dtype, tensor, record)
        for (dtype, tensor), sums in sorted(statistics.items())
        for record in sums.verdicts(tensor, f"{dtype}, ordinary values")
        if record.status is Status.FAIL
    ]
