"""Campaigns as users run them: processes, kills, resumption, replay."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

from typer.testing import CliRunner

from flashcheck.cli import app
from flashcheck.fuzz.campaign import Budget, Campaign
from flashcheck.fuzz.store import Store

ROOT = Path(__file__).parents[2]


def _start(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "flashcheck", *arguments],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def _cases(folder: Path) -> list[tuple[int, int]]:
    return [(line["shard"], line["n"]) for line in Store(folder).case_lines()]


def test_a_killed_campaign_loses_nothing_and_goes_on(tmp_path: Path) -> None:
    """kill -9 in the middle; --resume; the crash is a finding that replays and does not end the hunt."""
    folder = tmp_path / "campaign"
    fuzz = ("fuzz", "tests.fuzz.subjects:plain_segfault", "--db", str(folder), "-n", "1", "--seed", "3")
    first = _start(*fuzz, "--max-time", "300")
    until = time.monotonic() + 120
    while time.monotonic() < until and len(_cases(folder)) < 3:
        time.sleep(0.1)
    first.send_signal(signal.SIGKILL)
    first.communicate()
    before = _cases(folder)
    assert len(before) >= 3

    second = _start(*fuzz, "--resume", "--max-cases", "12")
    text, _ = second.communicate()
    assert second.returncode == 1, text
    after = _cases(folder)
    assert set(before) <= set(after), "cases were lost"
    assert max(Counter(after).values()) == 1, "cases were counted twice"
    assert f"{len(after):,} cases" in text
    assert "ended by SIGSEGV" in text

    findings = Store(folder).findings()
    assert any(f.group.check == "crash" for f in findings)
    crash = next(f for f in findings if f.group.check == "crash")
    assert crash.case.spec.num_queries == 21  # the smallest that crashes
    # In this process, which has torch; the kernel crashes in one of its own.
    replay = CliRunner().invoke(app, ["replay", str(Store(folder).finding_path(crash.id))])
    assert replay.exit_code == 1, replay.output
    assert replay.output.startswith("FAILED (the same, bit for bit)")
    assert json.loads(Store(folder).finding_path(crash.id).read_text())["kernel"] == crash.kernel


def test_a_kernel_that_is_compiled_meets_few_signatures_compiled_ahead(tmp_path: Path) -> None:
    store = Store(tmp_path / "campaign")
    store.open("tests.fuzz.subjects:compiled", 3, resume=False)
    where = ("tests.fuzz.subjects:compiled", "cpu", store, 3)
    state = Campaign(*where, Budget(cases=50), workers=1, ahead=1).run()
    lines = list(store.case_lines())
    assert state.cases == len(lines) >= 50
    assert state.findings == []
    assert state.ahead[0] >= 1
    assert 1 <= len({line["signature"] for line in lines if "signature" in line}) <= 5
