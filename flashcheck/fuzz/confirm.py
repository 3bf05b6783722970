"""Turns a first failure into a finding: reduced, repeated, with repros that were run."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

from flashcheck.files import write_atomically
from flashcheck.fuzz.case import FuzzCase
from flashcheck.fuzz.groups import Failure
from flashcheck.fuzz.reduce import as_case, reduced
from flashcheck.fuzz.runner import Runner
from flashcheck.fuzz.store import Finding
from flashcheck.problem import Problem

REDUCE_SECONDS = 20.0
REPETITIONS = 3
SCRIPT_SECONDS = 120.0


def confirmed(finding: Finding, runner: Runner, seconds: float = REDUCE_SECONDS) -> Finding:
    """The finding with its case reduced to tensors, for so long at most, and run again."""
    case, failure = _reduce(finding, runner, seconds)
    failures = [_failure_of(finding, runner, case) for _ in range(REPETITIONS)]
    same = sum(f is not None and f.digest == failure.digest for f in failures)
    return replace(finding, case=case, failure=failure, reproduces=(same, REPETITIONS))


def with_script(finding: Finding, runner: Runner, folder: Path) -> Finding:
    """Writes the stand-alone repro, test_ID.py, runs it once, and notes how it fared."""
    text = runner.script(finding.case, finding.failure, finding.id)
    if not text:
        return replace(finding, script="none: the repro could not be written")
    path = folder / f"test_{finding.id}.py"
    write_atomically(path, text)
    return replace(finding, script=_tried(path, finding.failure))


def _tried(path: Path, failure: Failure) -> str:
    """Runs the file: it must fail, in the way in which the kernel did."""
    try:
        done = subprocess.run(
            [sys.executable, path], capture_output=True, text=True, timeout=SCRIPT_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return f"{path} hangs" + ("" if failure.message.startswith("hang") else ", unexpectedly")
    if failure.check == "crash":
        died = done.returncode < 0 or f"code {done.returncode}" in failure.message
        return f"python {path}" if died else f"{path} does not crash: the crash needs earlier calls"
    last = (done.stderr.strip().splitlines() or [""])[-1]
    raised = failure.message.partition("raised ")[2].partition(":")[0]
    if "AssertionError" in done.stderr or (raised and raised in last):
        return f"python {path}"
    return f"{path} does not fail as the kernel did: {last or 'it passes'}"


def _failure_of(finding: Finding, runner: Runner, case: FuzzCase) -> Failure | None:
    failure = runner.judge(case, candidates=(finding.group,)).failure
    return failure if failure is not None and finding.group.holds(failure) else None


def _reduce(finding: Finding, runner: Runner, seconds: float) -> tuple[FuzzCase, Failure]:
    best: list[tuple[FuzzCase, Failure]] = [(finding.case, finding.failure)]
    alone = replace(finding.case, checks=(finding.group.check,))
    if finding.group.check in finding.case.checks and (failure := _failure_of(finding, runner, alone)):
        finding = replace(finding, case=alone)
        best.append((alone, failure))

    def fails(problem: Problem) -> bool:
        case = as_case(problem, finding.case)
        failure = _failure_of(finding, runner, case)
        if failure is not None:
            best.append((case, failure))
        return failure is not None

    problem = finding.case.build()
    if any(name.startswith("backward") for name in finding.case.checks):
        problem = runner.gradient(finding.case)
    reduced(problem, fails, runner.subject.capabilities, seconds)
    return best[-1]
