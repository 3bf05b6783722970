"""Where compiling is dear, shards keep to few signatures and still reach everything."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from flashcheck.fuzz.case import FuzzCase
from flashcheck.fuzz.hunter import CaseEvent, Shard, hunt
from flashcheck.fuzz.judge import CaseReport
from flashcheck.fuzz.runner import InProcessRunner
from flashcheck.fuzz.schedule import Scheduler
from flashcheck.fuzz.signature import OPTIONS, Foci, Focus, derived, samples
from flashcheck.fuzz.totals import LineWriter
from flashcheck.inputs.spec import ProblemSpec
from flashcheck.mutants.registry import CAPABILITIES, control


def _line(shard: int, gain: int, seconds: float) -> dict[str, object]:
    return {"shard": shard, "dtype": "x", "covered": list(range(gain)), "seconds": {"judge": seconds}}


def test_every_dtype_once_then_by_yield() -> None:
    scheduler = Scheduler(("fp16", "bf16", "fp32"), CAPABILITIES)
    first = [scheduler.choose(n) for n in range(3)]
    assert {f.dtype for f in first} == {"fp16", "bf16", "fp32"}
    rich = first[1]
    for n, focus in enumerate(first):
        scheduler.saw(_line(n, 50 if focus is rich else 1, 1.0))
    later = []
    for n in range(3, 33):
        later.append(scheduler.choose(n))
        scheduler.saw(_line(n, 50 if later[-1] == rich else 1, 1.0))
    counts = {f: later.count(f) for f in first}
    assert counts[rich] == max(counts.values())
    assert min(counts.values()) > 0  # nothing is given up for good


def _inside(focus: Focus, seed: int, cases: int = 40) -> list[ProblemSpec]:
    """What a shard judges there; of a kernel that is right and costs nothing."""
    drawn: list[ProblemSpec] = []
    runner = InProcessRunner(replace(control(), capabilities=CAPABILITIES))
    runner.judge = lambda case, *_: drawn.append(case.spec) or CaseReport()  # type: ignore[method-assign,func-returns-value]
    hunt(Shard(seed, seed, focus, cases), runner, lambda _: None)
    return drawn


def test_a_focus_keeps_what_is_compiled_and_draws_the_rest() -> None:
    foci = Foci(random.Random(3), CAPABILITIES, ("bf16", "fp16"))
    for seed in range(12):
        focus = foci.next()
        specs = _inside(focus, seed)
        assert len(specs) >= 20
        signatures = {derived(spec, True) for spec in specs}
        # One; more only where a window is wider than some of the sequences.
        assert len(signatures) <= (1 if focus.like is None or focus.like.window is None else 4)
        assert signatures <= {derived(s, True) for s in samples(focus, CAPABILITIES, True, seed)}
        assert len({spec.seed for spec in specs}) > 5
        assert len({spec.family for spec in specs}) > 5
        assert all(CAPABILITIES.refuses(spec.outline()) is None for spec in specs)
        assert {focus.kept(spec) for spec in specs} == set(specs)


def test_foci_meet_every_option_in_the_end() -> None:
    foci = Foci(random.Random(1), CAPABILITIES, ("fp16", "bf16"))
    likes = [focus.like for focus in (foci.next() for _ in range(40)) if focus.like is not None]
    assert {like.dtype for like in likes} == {"fp16", "bf16"}
    for name in OPTIONS:
        if name not in ("segments", "cu_seqlens"):
            assert {bool(getattr(like, name)) for like in likes} == {True, False}, name
    assert sum(not any(getattr(like, n) for n in OPTIONS) for like in likes) >= 5  # the fast paths
    assert Focus("bf16").narrowed(CAPABILITIES) is CAPABILITIES


class _Compiler:
    """A campaign of one worker in a time of its own: ``COMPILE`` seconds a signature, ``CASE`` a case."""

    COMPILE, CASE = 5.0, 0.1

    def __init__(self, scheduler: Scheduler, helpers: bool) -> None:
        self.scheduler, self.helpers = scheduler, helpers
        self.compiled: set[str] = set()
        self.ahead: set[str] = set()
        self.cases, self.clock, self.free_at = 0, 0.0, 0.0
        self.proposed: Focus | None = None

    def run(self, seconds: float) -> None:
        shard = 0
        while self.clock < seconds:
            self._help()
            focus = self.scheduler.choose(shard, self.helpers)
            for n, spec in enumerate(_inside(focus, shard)):
                name = derived(spec, False)
                cost = 0.0 if name in self.compiled | self.ahead else self.COMPILE
                line = {"shard": shard, "dtype": spec.dtype, "covered": [n], "seconds": {"judge": self.CASE}}
                line |= {"signature": name} if name not in self.compiled else {}
                line["seconds"] |= {"compile": cost} if name not in self.compiled else {}
                self.compiled.add(name)
                self.clock += cost + self.CASE
                self.cases += 1
                self.scheduler.saw(line)
            shard += 1

    def _help(self) -> None:
        if not self.helpers or self.clock < self.free_at:
            return
        if self.proposed is not None:
            self.scheduler.open(self.proposed)
            self.proposed = None
        if self.scheduler.due(helpers=True):
            self.proposed = self.scheduler.propose()
            names = {derived(s, False) for s in samples(self.proposed, CAPABILITIES, False, 0)}
            self.ahead |= names
            self.free_at = self.clock + len(names) * self.COMPILE


@pytest.mark.parametrize("helpers", [False, True])
def test_many_cases_are_judged_for_each_signature_that_is_compiled(helpers: bool) -> None:
    scheduler = Scheduler(("bf16",), CAPABILITIES, compiled=True)
    campaign = _Compiler(scheduler, helpers)
    campaign.run(60.0)
    assert len(campaign.compiled) >= 3
    assert campaign.cases >= 40 * len(campaign.compiled)
    own = len(campaign.compiled - campaign.ahead)
    assert own <= 1 if helpers else own * campaign.COMPILE <= 60.0 / 2


@pytest.mark.parametrize(("seconds", "narrow"), [(2.0, True), (0.01, False)])
def test_whether_compiling_is_dear_is_seen_from_first_calls(seconds: float, narrow: bool) -> None:
    scheduler = Scheduler(("fp16", "bf16"), CAPABILITIES, compiled=None, workers=4)
    assert scheduler.narrow
    assert not scheduler.settled
    first = [scheduler.choose(n) for n in range(4)]
    assert len(set(first)) == 4, "workers that start together compile different things"
    for n in range(4):
        scheduler.saw({"shard": n % 4, "signature": str(n), "dtype": "bf16", "seconds": {"compile": seconds}})
    assert scheduler.settled
    assert scheduler.narrow is narrow
    assert (scheduler.choose(4).like is not None) is narrow
    for n in range(4, 12):  # what was cheap came from an earlier run's cache
        scheduler.first_call(str(n), 2.0)
    assert scheduler.narrow


@pytest.mark.parametrize(("one_in", "narrow"), [(1, False), (2, False), (5, True)])
def test_arms_are_given_up_where_they_spare_no_compiling(one_in: int, narrow: bool) -> None:
    """A kernel that is compiled for every shape: an arm of it is as dear as everything, and holds less."""
    scheduler = Scheduler(("bf16",), CAPABILITIES, compiled=True)
    scheduler.choose(0)
    for n in range(40):
        assert scheduler.narrow or n >= 24
        seconds = {"compile": 2.0 if n % one_in == 0 else 0.0, "judge": 0.1}
        scheduler.saw({"shard": 0, "signature": str(n // one_in), "dtype": "bf16", "seconds": seconds})
    assert scheduler.narrow is narrow
    assert (scheduler.choose(1) == Focus("bf16")) is not narrow
    for n in range(40, 90):  # an earlier run's cache has the rest
        scheduler.saw({"shard": 1, "signature": str(n), "dtype": "bf16", "seconds": {"judge": 0.1}})
    assert scheduler.narrow


def test_helpers_find_out_whether_compiling_is_dear() -> None:
    scheduler = Scheduler(("bf16",), CAPABILITIES, compiled=None)
    scheduler.choose(0, helpers=True)
    proposed = 0
    while scheduler.due(helpers=True):
        scheduler.open(scheduler.propose())
        proposed += 1
    assert proposed == 2
    for n in range(3):
        scheduler.first_call(str(n), 0.01)
    assert scheduler.choose(1, helpers=True) == Focus("bf16")


def test_given_arms_are_all_there_are() -> None:
    foci = Foci(random.Random(1), CAPABILITIES, ("bf16",))
    arms = (foci.next(), foci.next())
    scheduler = Scheduler(("bf16",), CAPABILITIES, compiled=None, workers=4, arms=arms)
    assert not scheduler.due(helpers=True)
    assert {scheduler.choose(n) for n in range(12)} == set(arms)


def test_the_first_call_of_a_signature_is_compile_time() -> None:
    writer = LineWriter()
    spec = ProblemSpec(dtype="bf16")
    report = CaseReport(seconds={"build": 0.0, "first": 2.0, "kernel": 0.5, "judge": 1.0})
    event = CaseEvent(0, 1, FuzzCase(spec, ()), report, None)
    first, second = (writer.line(event, derived(spec, False))["seconds"] for _ in range(2))
    assert (first["compile"], first["kernel"]) == (2.0, 0.5)
    assert second["kernel"] == 2.5
    assert "compile" not in second
    assert "compile" not in LineWriter().line(event)["seconds"]  # nothing is compiled there
    assert derived(spec, False) != derived(ProblemSpec(dtype="bf16", head_dim=17), False)
    assert (
        "compile" not in writer.line(replace(event, report=CaseReport(seconds={"first": 0.1})), "")["seconds"]
    )
    slow = replace(event, report=CaseReport(seconds={"first": 0.1, "compile": 2.0}))
    assert writer.line(slow, derived(spec, False))["seconds"] == {"compile": 2.0, "kernel": 0.1}
    assert derived(spec, False) == derived(ProblemSpec(dtype="bf16", num_keys=77, scale=2.0), False)
