"""Helpers that call the kernel ahead of the judge: they meet the whole plan, and nothing that happens to them
matters."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from typer.testing import CliRunner

from flashcheck.ahead import CompilingAhead
from flashcheck.cli import app
from flashcheck.loading import load
from flashcheck.plan import Case, make_plan
from flashcheck.report.certificate import read

SUBJECTS = "tests.interface.subjects"
PATIENCE = 120.0


@pytest.fixture(name="notes")
def _notes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "notes"
    folder.mkdir()
    monkeypatch.setenv("NOTES", str(folder))
    return folder


def _cases(name: str, count: int) -> tuple[Case, ...]:
    return make_plan(load(f"{SUBJECTS}:{name}"), max_cases=count).cases


def _line(case: Case) -> str:
    spec = case.spec
    return f"{spec.num_queries} {spec.num_keys} {spec.head_dim} {spec.seed}"


def _met(notes: Path) -> set[str]:
    return {line for file in notes.iterdir() for line in file.read_text().splitlines()}


def _until(true: Callable[[], bool]) -> None:
    until = time.monotonic() + PATIENCE
    while time.monotonic() < until and not true():
        time.sleep(0.05)
    assert true()


def _run(name: str, cases: Sequence[Case], count: int, slow: float, compiled: int) -> None:
    with CompilingAhead(f"{SUBJECTS}:{name}", "cpu", cases, count, slow) as ahead:
        _until(lambda: ahead.compiled >= compiled)
    assert ahead.compiled == compiled
    assert not multiprocessing.active_children()


def test_slow_kernels_get_all_helpers_and_every_problem_is_met(
    notes: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NAP", "0.2")
    cases = _cases("noted", 16)
    _run("noted", cases, count=2, slow=0.15, compiled=16)
    assert {_line(case) for case in cases} <= _met(notes)
    assert len(list(notes.iterdir())) == 2


def test_a_quick_kernel_keeps_one_helper_and_judged_problems_are_skipped(notes: Path) -> None:
    cases = _cases("noted", 8)
    with CompilingAhead(f"{SUBJECTS}:noted", "cpu", cases, 2, 1e9) as ahead:
        for case in cases[:5]:
            ahead.judged(case)
        _until(lambda: ahead.compiled == 3)
    assert len(list(notes.iterdir())) == 1
    assert {_line(case) for case in cases[5:]} <= _met(notes)


def test_a_kernel_that_dies_ahead_is_certified_all_the_same(notes: Path, tmp_path: Path) -> None:
    cases = _cases("dies_ahead", 8)
    longer = [case for case in cases if case.spec.num_queries > 20]
    assert longer
    assert len(longer) < len(cases)
    _run("dies_ahead", cases, count=1, slow=1e9, compiled=8)
    assert {_line(case) for case in cases if case not in longer} <= _met(notes)

    path = tmp_path / "certificate.json"
    asked = ("certify", f"{SUBJECTS}:dies_ahead", "--compile-ahead", "1", "--max-cases", "8")
    done = CliRunner().invoke(app, [*asked, "--out", str(path)])
    assert done.exit_code == 3, done.output  # so few problems are incomplete
    certificate = read(path)
    assert certificate.run.judged == 8
    assert not certificate.findings


def test_leaving_ends_helpers_in_the_middle_of_a_call() -> None:
    with CompilingAhead(f"{SUBJECTS}:sleeps_ahead", "cpu", _cases("sleeps_ahead", 8), 1) as ahead:
        _until(lambda: bool(ahead.describe()))
        started = time.monotonic()
    assert time.monotonic() - started < 20.0
    assert not multiprocessing.active_children()


def test_no_helpers_no_processes() -> None:
    with CompilingAhead(f"{SUBJECTS}:noted", "cpu", _cases("noted", 8), 0) as ahead:
        assert not ahead.describe()
        assert not multiprocessing.active_children()
