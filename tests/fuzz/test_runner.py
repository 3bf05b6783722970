"""A kernel that kills its process is a report, and the next case is judged as if nothing had been."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from flashcheck.fuzz import runner as runner_module
from flashcheck.fuzz.case import FuzzCase
from flashcheck.fuzz.judge import CaseReport
from flashcheck.fuzz.runner import KernelLoadError, Runner
from flashcheck.inputs.spec import ProblemSpec

GOOD = FuzzCase(ProblemSpec(dtype="bf16"), ("forward.bound",))
DEADLY = FuzzCase(ProblemSpec(dtype="bf16", num_queries=32), ("forward.bound",))


@pytest.fixture(name="runner")
def _runner(tmp_path: Path) -> Iterator[Callable[..., Runner]]:
    made: list[Runner] = []

    def make(subject: str, limit: float = 30.0) -> Runner:
        made.append(Runner(f"tests.fuzz.subjects:{subject}", "cpu", limit, tmp_path / "log"))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.mark.parametrize(
    ("subject", "limit", "words"),
    [
        ("segfault", 30.0, "ended by SIGSEGV"),
        ("exit_", 30.0, "exited with code 3"),
        ("hang", 1.0, "no answer within 1 s"),
    ],
)
def test_a_death_is_a_failure_and_the_next_case_is_judged(
    runner: Callable[..., Runner], subject: str, limit: float, words: str
) -> None:
    alive = runner(subject)
    assert alive.judge(GOOD).failure is None
    alive.limit = limit  # for this case alone: an honest case may take as long on a busy machine
    failure = alive.judge(DEADLY).failure
    alive.limit = 30.0
    assert failure is not None
    assert failure.check == "crash"
    assert words in failure.message
    if subject == "segfault":  # the traceback says where
        assert any("segfaults" in line for line in failure.evidence), failure.evidence
    assert alive.judge(GOOD).failure is None
    assert alive.restarts == 1


def test_the_judges_own_time_is_no_hang(
    runner: Callable[..., Runner], monkeypatch: pytest.MonkeyPatch
) -> None:
    judge_case = runner_module.judge_case

    def slow(*args: Any) -> CaseReport:
        report = judge_case(*args)
        time.sleep(1.5)
        return report

    monkeypatch.setattr(runner_module, "judge_case", slow)  # the runner's process is forked with it
    patient = runner("hang", limit=1.0)
    assert patient.judge(GOOD).failure is None
    assert patient.restarts == 0
    failure = patient.judge(DEADLY).failure
    assert failure is not None
    assert "no answer within 1 s" in failure.message


def test_a_kernel_that_does_not_load_says_why(runner: Callable[..., Runner]) -> None:
    with pytest.raises(KernelLoadError, match="did you mean segfault"):
        runner("segfaul").judge(GOOD)


def test_times_add_up(runner: Callable[..., Runner]) -> None:
    seconds = runner("honest").judge(GOOD).seconds
    assert set(seconds) == {"build", "first", "kernel", "judge"}
    assert all(s >= 0 for s in seconds.values())
    assert seconds["first"] > 0
