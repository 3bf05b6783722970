"""One shard of a campaign: Hypothesis draws cases, climbs toward large margins, shrinks what fails.

Every group of failures is an exception type of its own, so that Hypothesis tells them apart, shrinks
each, and never slips from one bug to another on the way down.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Literal

from hypothesis import HealthCheck, Phase, Verbosity, given, seed, settings, target
from hypothesis import strategies as st

from flashcheck.fuzz.case import FuzzCase
from flashcheck.fuzz.groups import STRONGEST, Failure, Group, group_of
from flashcheck.fuzz.judge import CaseReport, backward_checks, extra_checks, forward_checks
from flashcheck.fuzz.runner import InProcessRunner, Runner
from flashcheck.fuzz.signature import Focus
from flashcheck.fuzz.statistics import ONE_IN, sampled
from flashcheck.inputs.combinations import is_legal
from flashcheck.inputs.spec import ProblemSpec
from flashcheck.inputs.strategies import specs
from flashcheck.kernel import Capabilities

SHRINK_SECONDS = 30.0
"""For each new group, after it was found; past the end of the shard's time too, but not of ``finish``."""

LARGEST_TARGET = 1e6

Passes = Literal["both", "forward", "backward"]


@dataclass(frozen=True, slots=True)
class Shard:
    """What a shard does. A pure function of these fields and the kernel, but for ``seconds``.

    Attributes:
        number: names it; seed: of Hypothesis' draws.
        focus: the part of the declaration that its problems are drawn from.
        cases: how many it draws at most, those for the statistics among them; shrinking comes on top.
        passes: "both" (the backward now and then), "forward" or "backward", on every case.
        largest: length of a sequence.
        seconds: it ends earlier when they are over; finish: nothing is shrunk or reduced past these.
        known: groups that are found already: their failures are counted and go by.
        again: cases that are judged before any is drawn.
    """

    number: int
    seed: int
    focus: Focus
    cases: int
    passes: Passes = "both"
    largest: int = 129
    seconds: float = math.inf
    finish: float = math.inf
    known: tuple[Group, ...] = ()
    again: tuple[FuzzCase, ...] = ()


@dataclass(frozen=True, slots=True)
class CaseEvent:
    """One case was judged."""

    shard: int
    index: int
    case: FuzzCase
    report: CaseReport
    group: Group | None


@dataclass(slots=True)
class Found:
    """A new group.

    Attributes:
        group: as its first failure defined it; fits: the classes that all its failures have in common.
        case, failure: the smallest so far; first: the case that was found first.
        cases: failures seen; after_cases, at: how many cases of the shard, and when (time.time()).
    """

    group: Group
    case: FuzzCase
    failure: Failure
    first: FuzzCase
    after_cases: int
    at: float
    fits: Group
    cases: int = 1


class CaseFailedError(Exception):
    """Tells Hypothesis that a case failed; each group raises a subclass of its own."""


class _Stop(BaseException):
    """Ends a Hypothesis run from inside a test case."""


@dataclass(slots=True)
class _Hunt:
    """State of one shard."""

    shard: Shard
    runner: Runner | InProcessRunner
    emit: Callable[[CaseEvent], None]
    stopped: Callable[[], bool]
    deadline: float
    finish: float
    found: dict[str, Found] = field(default_factory=dict)
    types: dict[str, type[CaseFailedError]] = field(default_factory=dict)
    reports: dict[FuzzCase, tuple[CaseReport, Group | None]] = field(default_factory=dict)
    seen: Counter[str] = field(default_factory=Counter)
    shrink_until: float = 0.0
    index: int = 0

    def sample(self, case: FuzzCase) -> None:
        """Judges a case that Hypothesis knows nothing of."""
        self._judge(case)

    def run(self, case: FuzzCase) -> None:
        """Judges a case that Hypothesis drew, and says what it is worth."""
        report, group = self.reports.get(case) or self._judge(case)
        if group is not None:
            raise self.types[group.id](group.id)
        if report.masked or report.judge_fault:
            return  # climbing toward a known bug would find it again and nothing else
        _aim(report, self._novelty(case.spec))

    def _judge(self, case: FuzzCase) -> tuple[CaseReport, Group | None]:
        now = time.monotonic()
        until = max(self.shrink_until, self.deadline) if self.found else self.deadline
        if self.stopped() or now > min(until, self.finish):
            raise _Stop
        if not self.found and self.index >= self.shard.cases:
            raise _Stop
        groups = [f.fits for f in self.found.values()]
        report = self.runner.judge(case, self.shard.known, groups)
        group = None
        if report.failure is not None:
            failure = report.failure
            known = [g for g in self.shard.known if not g.yields_to(failure)]
            group = self._named(group_of(failure, (*known, *groups)))
            if group in self.shard.known:  # a crash: the dead process could not know
                report, group = CaseReport(masked=(group.id,), seconds=report.seconds), None
            else:
                self._note(group, case, failure)
        self.index += 1
        self.emit(CaseEvent(self.shard.number, self.index, case, report, group))
        self.reports[case] = report, group
        return report, group

    def _named(self, group: Group) -> Group:
        """A group of this shard as its first failure defined it: its name stays while its classes narrow."""
        return next((f.group for f in self.found.values() if group == f.fits), group)

    def _note(self, group: Group, case: FuzzCase, failure: Failure) -> None:
        found = self.found.get(group.id)
        if found is None:
            self.found[group.id] = Found(group, case, failure, case, self.index + 1, time.time(), group)
            self.types[group.id] = type(f"Group{group.id}", (CaseFailedError,), {})
            self.shrink_until = max(self.shrink_until, time.monotonic()) + SHRINK_SECONDS
            return
        found.cases += 1
        stronger = found.fits.yields_to(failure)
        weaker = found.failure.check in STRONGEST and failure.check not in STRONGEST
        found.fits = found.fits.joined(failure)
        if stronger:
            found.fits = replace(found.fits, check=failure.check)
        if stronger or (not weaker and case.size < found.case.size):
            found.case, found.failure = case, failure

    def _novelty(self, spec: ProblemSpec) -> float:
        """How rare the spec's features are among those of this shard, in bits."""
        features = features_of(spec)
        self.seen.update(features)
        total = max(1, self.index)
        return sum(math.log2(total / self.seen[f]) for f in features)


def hunt(
    shard: Shard,
    runner: Runner | InProcessRunner,
    emit: Callable[[CaseEvent], None],
    stopped: Callable[[], bool] = lambda: False,
) -> list[Found]:
    """Runs a shard; the new groups that it found, each with its smallest case."""
    subject = runner.subject
    now = time.monotonic()
    state = _Hunt(shard, runner, emit, stopped, now + shard.seconds, now + shard.finish)

    first = shard.cases // ONE_IN

    @settings(
        max_examples=shard.cases - first,
        # Campaigns keep examples of their own, as data (`Store.unfinished`). With a database Hypothesis keeps
        # a front of its best cases too: that takes as long as drawing them, and cases to shrink it.
        database=None,
        derandomize=False,  # where CI is set Hypothesis would ignore the seed
        deadline=None,
        verbosity=Verbosity.quiet,
        phases=(Phase.generate, Phase.target, Phase.shrink),
        suppress_health_check=list(HealthCheck),
        report_multiple_bugs=True,
        print_blob=False,
    )
    @seed(shard.seed)
    @given(case=cases(subject.capabilities, shard, subject.has_backward))
    def attention_case(case: FuzzCase) -> None:
        state.run(case)

    try:
        for case in shard.again:
            state.sample(case)
        for case in sample(subject.capabilities, shard, subject.has_backward, first):
            state.sample(case)
        attention_case()
    except (_Stop, CaseFailedError):
        pass  # what failed stands in state.found
    except ExceptionGroup as several:
        others = several.split(CaseFailedError)[1]
        if others is not None:
            raise others from None
    return list(state.found.values())


def sample(capabilities: Capabilities, shard: Shard, backward: bool, count: int) -> Iterator[FuzzCase]:
    """The shard's cases for the statistics; of the gradients too, where there is a backward."""
    backward = backward and shard.passes != "forward"
    checks = forward_checks() + (backward_checks() if backward else ())
    return sampled(shard.focus, capabilities, checks, shard.seed, count)


def cases(capabilities: Capabilities, shard: Shard, backward: bool) -> st.SearchStrategy[FuzzCase]:
    """Cases of one dtype: a spec that the declaration covers, and the checks to make on it."""
    forward, focus = forward_checks(), shard.focus
    drawn = specs(focus.narrowed(capabilities), focus.dtype, shard.largest)
    if focus.like is not None:
        drawn = drawn.map(focus.kept).filter(lambda spec: is_legal(spec, capabilities))
    extra = st.sampled_from(_extra(shard.passes, backward))
    return st.builds(lambda spec, more: FuzzCase(spec, (*forward, *more)), drawn, extra)


def _extra(passes: Passes, backward: bool) -> tuple[tuple[str, ...], ...]:
    if passes == "both":
        return extra_checks(backward)
    return (backward_checks() if backward and passes == "backward" else (),)


def features_of(spec: ProblemSpec) -> tuple[str, ...]:
    """What makes a spec special: options, edges of tiles, heads, values."""
    names = ("mask", "window", "bias", "alibi", "softcap", "sink", "key_lengths", "segments", "causal")
    options = [n for n in names if getattr(spec, n) not in (None, False)]
    edges = [
        f"{side} {min(n // 64, 2)} tiles and {n % 16 if n % 16 in (0, 1, 15) else 'some'}"
        for side, n in (("nq", spec.num_queries), ("nk", spec.num_keys))
    ]
    order = "nq>nk" if spec.num_queries > spec.num_keys else "nq<=nk"
    return (
        "+".join(options) or "plain",
        *edges,
        f"{order} {spec.causal}",
        f"d {spec.head_dim} {spec.value_dim}",
        f"heads {spec.num_heads}/{spec.num_kv_heads}",
        f"scale {spec.scale}",
        f"{spec.family} {'+'.join(options)}",
    )


def _aim(report: CaseReport, novelty: float) -> None:
    for tensor, margin in report.margins.items():
        target(min(margin, LARGEST_TARGET), label=f"margin {tensor}")
    for tensor, ratio in report.rms.items():
        target(min(ratio, LARGEST_TARGET), label=f"rms {tensor}")
    for tensor, (new, old, _) in report.against.items():
        target(max(-LARGEST_TARGET, min(new - old, LARGEST_TARGET)), label=f"growth {tensor}")
    target(novelty, label="rarity")
