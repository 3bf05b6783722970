"""Hypothesis finds, tells bugs apart, shrinks, and lets known bugs go by."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import settings

from flashcheck.fuzz.case import FuzzCase
from flashcheck.fuzz.groups import Group, group_of
from flashcheck.fuzz.hunter import CaseEvent, Found, Shard, features_of, hunt
from flashcheck.fuzz.reduce import as_case, reduced
from flashcheck.fuzz.signature import Focus
from flashcheck.inputs.spec import ProblemSpec
from flashcheck.kernel import Kernel
from flashcheck.problem import Problem
from tests.checks import subjects as plain
from tests.fuzz import subjects

Make = Callable[[Kernel], Any]


def _hunt(runner: Any, **changes: Any) -> tuple[list[Found], list[CaseEvent]]:
    events: list[CaseEvent] = []
    shard = {"number": 0, "seed": 1, "focus": Focus("bf16"), "cases": 40} | changes
    return hunt(Shard(**shard), runner, events.append), events


def test_bugs_are_told_apart_shrunk_and_once_known_go_by(in_process: Make) -> None:
    found, events = _hunt(in_process(subjects.two), cases=30)
    assert len(found) == 2, [f.group for f in found]
    text = " ".join(" ".join(f.group.classes) for f in found)
    assert "causal" in text
    assert "LSE" in text
    for one in found:
        assert one.case.size <= one.first.size
        assert one.case.spec.num_queries <= 16
        assert one.case.spec.num_heads == 1
        assert one.case.spec.family == "normal"
    assert sum(f.cases for f in found) == sum(e.group is not None for e in events)

    known = tuple(f.group for f in found)
    others, events = _hunt(in_process(subjects.two), cases=10, known=known)
    assert others == []
    assert {name for e in events for name in e.report.masked} == {g.id for g in known}


def test_values_that_hide_the_fault_are_one_group_with_those_that_show_it(in_process: Make) -> None:
    """Subnormals: a few units apart, no experiment tells faults from another. A second fault stays apart."""
    checks = ("forward.bound",)
    spec = ProblemSpec(
        dtype="bf16", num_heads=1, num_kv_heads=1, num_queries=129, num_keys=16, head_dim=16, value_dim=8,
        causal="top_left", family="subnormals", seed=1,
    )  # fmt: skip
    shown = in_process(subjects.two).judge(FuzzCase(replace(spec, family="normal"), checks)).failure
    hidden = in_process(subjects.two).judge(FuzzCase(spec, checks)).failure
    assert shown is not None
    assert hidden is not None
    assert hidden.faults == ("causal",)
    assert group_of(shown, ()).holds(hidden)
    both = in_process(subjects.two_at_once).judge(FuzzCase(spec, checks)).failure
    assert both is not None
    assert both.message.startswith("O is outside")
    assert not group_of(shown, ()).holds(both)


def test_nothing_is_shrunk_past_the_finish(in_process: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = in_process(subjects.wrong_scale)
    clock = SimpleNamespace(monotonic=lambda: float(runner.calls), time=time.time)  # a case is a second
    monkeypatch.setattr("flashcheck.fuzz.hunter.time", clock)
    found, _ = _hunt(runner, seconds=2.0, finish=5.0)
    assert found
    assert runner.calls == 6


def test_an_honest_kernel_leaves_nothing(in_process: Make) -> None:
    found, events = _hunt(in_process(subjects.honest))
    assert found == []
    assert [e.index for e in events] == list(range(1, len(events) + 1))
    assert not any(e.report.judge_fault for e in events)
    assert max(m for e in events for m in e.report.margins.values()) <= 1
    assert {"rms", "margin", "covered"} <= {
        name
        for e in events
        for name, value in (
            ("rms", e.report.rms),
            ("margin", e.report.margins),
            ("covered", e.report.covered),
        )
        if value
    }


def test_a_shard_is_a_function_of_its_seed(in_process: Make) -> None:
    runs = [[e.case for e in _hunt(in_process(subjects.honest), cases=12, seed=s)[1]] for s in (5, 5, 6)]
    assert runs[0] == runs[1]
    assert runs[0] != runs[2]


def test_ci_changes_nothing(in_process: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hypothesis takes other defaults where CI is set: every run the same cases."""
    monkeypatch.setattr(
        "flashcheck.fuzz.hunter.settings",
        lambda **given: settings(settings.get_profile("ci"), **given),
    )
    one, other = ([e.case for e in _hunt(in_process(subjects.honest), cases=4, seed=n)[1]] for n in (5, 6))
    assert one != other


def test_it_stops_when_told(in_process: Make) -> None:
    runner = in_process(subjects.honest)
    hunt(Shard(0, 1, Focus("bf16"), 100), runner, lambda _: None, lambda: runner.calls >= 5)
    assert runner.calls == 5
    hunt(Shard(0, 1, Focus("bf16"), 100, seconds=0.0), runner, lambda _: None)
    assert runner.calls == 5


def test_reduction_cuts_tokens_heads_dims_options_and_values() -> None:
    spec = ProblemSpec(
        dtype="bf16", batch=2, num_heads=4, num_kv_heads=2, num_queries=9, num_keys=13, causal="top_left",
        mask="random", scale=0.25, head_dim=24, value_dim=24,
    )  # fmt: skip
    problem = spec.build()
    spot = float(problem.v[1, 1, 7, 5])

    def fails(p: Problem) -> bool:
        return p.num_queries >= 2 and bool((p.v == spot).any())

    small = reduced(problem, fails, plain.CAPABILITIES, 20.0)
    assert fails(small)
    assert small.options() == ("scale",)
    assert small.scale == 1.0
    assert (small.batch, small.num_heads, small.num_kv_heads) == (1, 1, 1)
    assert (small.num_queries, small.num_keys) == (2, 1)
    assert (small.head_dim, small.value_dim) == (1, 1)
    assert not bool(small.q.any())
    assert not bool(small.k.any())
    case = as_case(small, FuzzCase(spec, ("forward.bound",)))
    assert case.size < (22,)
    assert float(case.build().v.max()) == spot


@pytest.mark.parametrize("declared", [(8, 32), (16, 16)])
def test_reduction_stays_inside_the_declaration(declared: tuple[int, int]) -> None:
    subject = plain.kernel(head_dim=declared, head_dim_multiple=8, value_dim_differs=False, empty_rows=False)
    problem = ProblemSpec(dtype="bf16", head_dim=16, value_dim=16, mask="random").build()

    def fails(p: Problem) -> bool:
        assert subject.capabilities.refuses(p) is None
        assert bool(p.visible().any(-1).all())
        return True

    small = reduced(problem, fails, subject.capabilities, 10.0)
    assert small.head_dim == small.value_dim == declared[0]


def test_features_tell_specs_apart() -> None:
    base = features_of(ProblemSpec())
    assert features_of(ProblemSpec(seed=9)) == base
    for changed in ({"mask": "holes"}, {"num_keys": 65}, {"family": "spiked"}, {"causal": "top_left"}):
        assert features_of(ProblemSpec(**changed)) != base  # type: ignore[arg-type]
    assert Group("c", ("x",)).id != Group("c", ("y",)).id


def test_what_failed_before_is_judged_first(in_process: Make) -> None:
    (first, *_), _ = _hunt(in_process(subjects.wrong_scale), cases=10)
    (again, *_), events = _hunt(in_process(subjects.wrong_scale), cases=8, seed=7, again=(first.first,))
    assert events[0].case == first.first
    assert events[0].group == again.group == first.group
