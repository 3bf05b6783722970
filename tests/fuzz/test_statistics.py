"""Verdicts over many cases: what no single problem shows, and what a search must not touch."""

from __future__ import annotations

import io
import json
import multiprocessing
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from flashcheck.commands.fuzz import exit_code
from flashcheck.commands.fuzz_view import print_summary
from flashcheck.fuzz import worker as worker_module
from flashcheck.fuzz.campaign import Budget, Campaign, State, _Worker
from flashcheck.fuzz.hunter import CaseEvent, Shard, sample
from flashcheck.fuzz.judge import CaseReport, judge_case
from flashcheck.fuzz.signature import Focus
from flashcheck.fuzz.statistics import ORDINARY, failed_statistics
from flashcheck.fuzz.store import Store
from flashcheck.fuzz.totals import LineWriter, totals_of
from flashcheck.kernel import Kernel
from flashcheck.mutants import MUTANTS
from flashcheck.mutants.registry import CAPABILITIES, control

SHARD = Shard(0, 7, Focus("bf16"), cases=80)


def _state(kernel: Kernel, count: int) -> State:
    """What a campaign knows after so many sampled cases, read back from its lines."""
    writer = LineWriter()
    lines = [
        writer.line(CaseEvent(0, n, case, judge_case(kernel, case), None))
        for n, case in enumerate(sample(CAPABILITIES, SHARD, False, count))
    ]
    halves = [json.loads(json.dumps(half)) for half in (lines[: count // 2], lines[count // 2 :])]
    totals = totals_of(halves[0])
    for line in halves[1]:  # as a run that was resumed goes on
        totals.add(line)
    return State("k", 1, 1, totals, [], stopped="all cases were judged")


def test_one_more_rounding_is_found_by_many_cases_together() -> None:
    """Every element lies inside its bound; the mean does not. The control passes on the same cases."""
    state = _state(MUTANTS["output-truncated"].make(), 8)
    failed = {record.check for _, _, record in failed_statistics(state.totals.statistics)}
    assert "forward.rms" in failed
    assert exit_code(state) == 1
    console = Console(width=200, file=io.StringIO())
    print_summary(console, state, "folder")
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert "FOUND  k  forward.rms  bf16  O" in text
    assert "flashcheck certify k --dtype bf16" in text

    honest = _state(control(), 8)
    assert honest.totals.statistics["bf16", "O"].judged
    assert failed_statistics(honest.totals.statistics) == []
    assert exit_code(honest) == 0


def test_samples_follow_from_the_shard_alone() -> None:
    one, again = (list(sample(CAPABILITIES, SHARD, True, 20)) for _ in range(2))
    assert one == again
    assert len(one) == len(set(one)) == 20
    assert {case.spec.family for case in one} <= set(ORDINARY)
    assert {case.spec.gradient for case in one} == {"normal"}
    other = list(sample(CAPABILITIES, Shard(1, 8, Focus("bf16"), cases=80), True, 20))
    assert not set(one) & set(other)


def test_an_output_outside_its_bound_adds_nothing() -> None:
    """It is a finding already, and would make every mean one too. A weaker failure adds what it is."""
    case = list(sample(CAPABILITIES, SHARD, False, 2))[1]
    report = judge_case(MUTANTS["scale-wrong"].make(), case)
    assert report.failure is not None
    assert report.failure.check == "forward.bound"
    assert report.statistics == {}
    report = judge_case(MUTANTS["output-truncated"].make(), case)
    assert report.failure is not None
    assert report.failure.check == "forward.algorithm"
    assert report.statistics["O"]["rms"]["rows"] > 0


def test_a_fault_of_a_worker_ends_the_campaign(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is flashcheck's own: not a worker that somebody ended, to be started again and again."""
    runner = SimpleNamespace(subject="subject", close=lambda: None)
    monkeypatch.setattr(worker_module, "Runner", lambda *_, **__: runner)
    monkeypatch.setattr(worker_module, "_serve", lambda *_: 1 // 0)
    monkeypatch.setattr("signal.signal", lambda *_: None)
    monkeypatch.setattr("hypothesis.configuration.set_hypothesis_home_dir", lambda _: None)
    ours, theirs = multiprocessing.Pipe()
    worker_module.work(worker_module.WorkerTask("k", "cpu", Store(tmp_path), "0", 1.0, 0.0), theirs)
    assert ours.recv()[0] == "subject"

    campaign = Campaign("k", "cpu", Store(tmp_path), 1, Budget())
    campaign._workers.append(_Worker(None, ours))
    campaign._receive(campaign._workers[0])
    assert campaign._over()
    assert campaign.state.restarts == 0
    (fault,) = campaign.state.totals.faults
    assert "ZeroDivisionError" in fault
    assert exit_code(campaign.state) == 4


def test_reports_without_sums_leave_the_line_short() -> None:
    (case,) = sample(CAPABILITIES, SHARD, False, 1)
    assert "statistics" not in LineWriter().line(CaseEvent(0, 1, case, CaseReport(), None))
