"""What the measurements count, and that those that take hours can be stopped and go on."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flashcheck.errors import ArgumentError
from flashcheck.fuzz import time_to_failure
from flashcheck.fuzz.campaign import State
from flashcheck.fuzz.rate import _Window, rate
from flashcheck.fuzz.store import Store
from flashcheck.fuzz.time_to_failure import measure_mutants
from flashcheck.fuzz.totals import Totals


def _run(name: str, seed: int, _seconds: float) -> dict[str, Any]:
    parts = {"in_kernel": 1.0, "in_judge": 10.0 * seed}
    if name == "b" and seed < 3:
        return {"seed": seed, "found": False, "seconds": 20.0, "cases": 9, **parts}
    size = {"tokens": 3, "heads": 1, "check": "forward.bound", "groups": 1}
    return {"seed": seed, "found": True, "seconds": float(seed), "cases": seed, **size, **parts}


class _Inline:
    """A pool without processes, that is stopped by Ctrl-C before its ``limit``-th run."""

    limit, done = 99, 0

    def __init__(self, *_: object) -> None: ...

    def __enter__(self) -> _Inline:
        return self

    def __exit__(self, *_: object) -> None: ...

    def imap_unordered(self, _function: object, asked: list[tuple[str, int, float]]) -> Iterator[Any]:
        for name, seed, seconds in asked:
            if _Inline.done == _Inline.limit:
                raise KeyboardInterrupt
            _Inline.done += 1
            yield name, seed, _run(name, seed, seconds)


def test_a_stopped_measurement_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    context = SimpleNamespace(Pool=_Inline)
    monkeypatch.setattr(time_to_failure.multiprocessing, "get_context", lambda _: context)
    out, said = tmp_path / "mutants.json", []
    where: tuple[Any, ...] = (["a", "b"], 3, 20.0, out, {"what": "mutants"})
    monkeypatch.setattr(_Inline, "limit", 4)
    with pytest.raises(KeyboardInterrupt):
        measure_mutants(*where, say=said.append)
    held = json.loads(out.read_text())
    assert [row["mutant"] for row in held["mutants"]] == ["a"]
    assert [(row["mutant"], len(row["runs"])) for row in held["unfinished"]] == [("b", 1)]
    assert any(line.startswith("   4 of 6") and "b 1: not found in 9 cases" in line for line in said)

    monkeypatch.setattr(_Inline, "limit", 99)
    whole = measure_mutants(*where, say=said.append)
    assert _Inline.done == 6, "nothing is measured twice"
    assert json.loads(out.read_text())["unfinished"] == []
    assert "6 runs of at most 20 CPU seconds, 4 done before" in said
    assert whole["summary"] == {
        "mutants": 2,
        "cpu_seconds_allowed": 20.0,
        "found": 1,
        "median_cpu_seconds": float("inf"),
        "median_cases": float("inf"),
        "not_found": ["b"],
        "judge_over_kernel": 20.0,
        "shrunk_tokens": 3,
        "shrunk_heads": 1,
    }
    with pytest.raises(ArgumentError, match="--out"):
        measure_mutants(["a", "b"], 5, 20.0, out, {})


def test_a_fault_is_found_shrunk_and_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time_to_failure, "SHRINKING", 0.5)
    run = time_to_failure.time_to_failure("scale-wrong", 1, 20.0)
    assert run["found"]
    assert run["tokens"] <= 2 * 129
    assert min(run["in_kernel"], run["in_judge"]) > 0


def test_a_rate_is_of_the_cases_between_two_moments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(monotonic=lambda: now, time=lambda: 0.0)
    monkeypatch.setattr("flashcheck.fuzz.rate.time", clock)
    now = 0.0
    store = Store(tmp_path)
    window = _Window(store, workers=2, seconds=10.0)
    state = State("k", 1, 2, Totals(), [])

    def at(moment: float, cases: int, **seconds: float) -> None:
        nonlocal now
        now, state.cases = moment, cases
        state.totals.seconds.update(seconds)
        window(state)

    (tmp_path / "cases").mkdir()
    store.case_log("0").touch()
    at(5.0, 3, judge=1.0)
    store.case_log("1").touch()
    at(6.0, 7, judge=1.0)
    at(10.0, 20, judge=2.0, compile=3.0)  # here it begins
    at(12.0, 30, judge=6.0)
    assert not state.stopped
    at(20.0, 120, judge=2.0, compile=4.0)
    assert state.stopped
    result = window.result()
    assert (result["cases"], result["seconds"], result["cases_per_second"]) == (100, 10.0, 10.0)
    assert result["cases_per_second_without_compiling"] == 12.5  # 2 of 10 seconds of both workers
    assert result["share"] == {"judge": 0.4, "compile": 0.2, "hunter and pipes": 0.4}


def test_signatures_are_compiled_before_and_are_all_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flashcheck.fuzz.rate.SETTLING", 0.1)
    row = rate("tests.fuzz.subjects:compiled", "cpu", workers=1, seconds=1.0, passes="forward", signatures=2)
    assert row["before"]["foci"] == 2
    assert row["before"]["signatures"] >= 2
    assert row["cases"] > 0
    assert row["findings"] == []
