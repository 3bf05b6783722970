"""What is on disk survives kills and may be shared."""

from __future__ import annotations

import json
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from flashcheck.errors import ArgumentError
from flashcheck.fuzz.case import FuzzCase
from flashcheck.fuzz.files import Lines, read_lines
from flashcheck.fuzz.groups import Failure, Group
from flashcheck.fuzz.hunter import CaseEvent
from flashcheck.fuzz.judge import CaseReport
from flashcheck.fuzz.store import Finding, Store, read_finding
from flashcheck.fuzz.totals import LineWriter, totals_of
from flashcheck.inputs.spec import ProblemSpec

CASE = FuzzCase(ProblemSpec(dtype="bf16"), ("forward.bound",))


def _finding(**changes: object) -> Finding:
    group = Group("forward.bound", ("x",))
    failure = Failure("forward.bound", "O", "m", guesses=("x it is",), faults=("x",), margin=2.0)
    base = Finding(kernel="k", device="cpu", group=group, failure=failure, case=CASE, first=CASE)
    return replace(base, **changes)  # type: ignore[arg-type]


def test_a_line_that_a_kill_has_cut_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    for _ in range(3):
        Lines(path).append({"n": 1})
    path.write_text(path.read_text() + '{"n": 1')
    assert len(list(read_lines(path))) == 3


def test_findings_round_trip_and_merge(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.add(_finding(reproduces=(3, 3)))
    smaller = replace(CASE, spec=ProblemSpec(dtype="bf16", num_queries=2))
    store.add(_finding(case=smaller))
    store.add(_finding(case=replace(CASE, spec=ProblemSpec(dtype="bf16", num_queries=90))))
    (stored,) = store.findings()
    assert stored.cases == 3
    assert stored.case == smaller
    assert stored.first == CASE
    assert read_finding(store.finding_path(stored.id)) == stored
    stronger = Failure("forward.bound", "O", "m", faults=("x",))
    weak = Group("forward.algorithm", ("x", "y"))
    other = Store(tmp_path / "other")
    other.add(_finding(group=weak, failure=replace(stronger, check="forward.algorithm"), case=smaller))
    (kept,) = [other.add(_finding())]
    assert (kept.group.check, kept.case, kept.cases) == ("forward.bound", CASE, 2)
    assert [f.id for f in other.findings()] == [kept.id]
    broken = tmp_path / "broken.json"
    broken.write_text("{}")
    with pytest.raises(ArgumentError, match="finding"):
        read_finding(broken)


def test_a_finding_that_another_explains_becomes_part_of_it(tmp_path: Path) -> None:
    store = Store(tmp_path)
    seen = Failure("forward.bound", "O", "m", looks=("O is wrong",))
    first = store.add(_finding(group=Group("forward.bound", (), ("O is wrong",)), failure=seen))
    new = store.add(_finding())
    assert len(store.findings()) == 2
    store.absorb(first, replace(seen, faults=("x",)), new.id)
    (kept,) = store.findings()
    assert (kept.id, kept.cases) == (new.id, 2)


def test_every_shard_is_claimed_once(tmp_path: Path) -> None:
    taken: list[int] = []

    def claim() -> None:
        store = Store(tmp_path)
        for _ in range(20):
            taken.append(store.claim_shard())

    threads = [threading.Thread(target=claim) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(taken) == list(range(80))


def test_a_campaign_belongs_to_one_kernel(tmp_path: Path) -> None:
    assert Store(tmp_path).open("a:b", 7, resume=False) == 7
    assert Store(tmp_path).open("a:b", 8, resume=True) == 7
    with pytest.raises(ArgumentError, match="--resume"):
        Store(tmp_path).open("a:b", 7, resume=False)
    with pytest.raises(ArgumentError, match="the campaign of a:b"):
        Store(tmp_path).open("c:d", 7, resume=True)


def test_totals_follow_from_the_lines() -> None:
    writer = LineWriter()
    reports = [
        CaseReport(
            margins={"O": 0.5}, covered=("no option",), seconds={"build": 1.0, "first": 2.0, "judge": 1.0}
        ),
        CaseReport(margins={"O": 0.25, "LSE": 0.125}, covered=("no option",), seconds={"build": 1.0}),
        CaseReport(masked=("g",), margins={"O": 9.0}, seconds={}),
        CaseReport(judge_fault="oracle", seconds={}),
    ]
    lines = [writer.line(CaseEvent(0, i, CASE, r, None)) for i, r in enumerate(reports)]
    totals = totals_of(json.loads(json.dumps(lines)))
    assert totals.total == totals.cases["bf16"] == 4
    assert {k: v[0] for k, v in totals.worst.items()} == {("bf16", "O"): 0.5, ("bf16", "LSE"): 0.125}
    assert totals.worst["bf16", "LSE"][1] == CASE.to_json()
    assert totals.seconds == {"build": 2.0, "kernel": 2.0, "judge": 1.0}
    assert totals.failures == {"g": 1}
    assert totals.faults == {"oracle": 1}
    assert totals.covered == {"bf16": {"no option"}}


def test_a_group_that_was_not_finished_is_not_lost(tmp_path: Path) -> None:
    """A run that is killed while it shrinks has told of the failure in a line only."""
    store = Store(tmp_path)
    lines = Lines(store.case_log("0"))
    finding = _finding()
    for name, seed in ((finding.id, 0), ("other", 1), ("other", 2)):
        case = replace(finding.case, spec=replace(finding.case.spec, seed=seed))
        lines.append({"shard": 0, "n": seed, "dtype": "bf16", "group": name, "case": case.to_json()})
    lines.append({"shard": 0, "n": 3, "dtype": "bf16"})
    assert [case.spec.seed for case in store.unfinished()] == [0, 1]
    store.add(finding)
    assert [case.spec.seed for case in store.unfinished()] == [1]


def test_of_cases_alike_the_confirmed_one_stays(tmp_path: Path) -> None:
    """A finding is stored when it is found, and again with its repro: also where nothing could be cut."""
    store = Store(tmp_path)
    store.add(_finding())
    store.add(_finding(script="python test.py", reproduces=(3, 3), cases=0))
    store.add(_finding())
    (stored,) = store.findings()
    assert (stored.script, stored.reproduces, stored.cases) == ("python test.py", (3, 3), 2)


def test_a_campaign_whose_kernel_could_not_be_loaded_is_none(tmp_path: Path) -> None:
    store = Store(tmp_path)
    assert store.open("k", 1, resume=False) == 1
    store.forget_empty()
    assert store.open("k", 2, resume=False) == 2
    Lines(store.case_log("0")).append({"shard": 0})
    store.forget_empty()
    with pytest.raises(ArgumentError, match="--resume"):
        store.open("k", 3, resume=False)
