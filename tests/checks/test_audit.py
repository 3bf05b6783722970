"""The audit reports what it sees: caught, survived, false alarm."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from flashcheck import audit
from flashcheck.commands.audit import run_audit
from flashcheck.mutants import MUTANTS, Mutant, control
from flashcheck.report.audit_table import print_audit


def text(rows: list[audit.AuditRow]) -> str:
    out = io.StringIO()
    print_audit(Console(file=out, width=200), rows)
    return out.getvalue()


def run(names: tuple[str, ...], rivals: bool = False, file: Path | None = None) -> int:
    stdout, stderr = Console(file=io.StringIO()), Console(file=io.StringIO())
    return run_audit(names, rivals, None, False, file, stdout, stderr)


@pytest.fixture(name="only")
def _only(monkeypatch: pytest.MonkeyPatch) -> object:
    def choose(*mutants: Mutant) -> None:
        monkeypatch.setattr(audit, "MUTANTS", {m.name: m for m in mutants})

    return choose


def test_caught_mutants_make_a_sound_audit(only, tmp_path: Path) -> None:
    only(MUTANTS["causal-one-extra"], MUTANTS["empty-row-mean"])
    rows = audit.audit()
    assert [row.good for row in rows] == [True, True]
    assert "one key past the diagonal" in rows[0].likely
    assert "SOUND  2 of 2" in text(rows)
    assert run(("causal-one-extra", "empty-row-mean"), file=tmp_path / "audit.json") == 0
    data = json.loads((tmp_path / "audit.json").read_text())
    assert [row["good"] for row in data["mutants"]] == [True, True]


def test_a_mutant_that_no_check_sees_survives(only, monkeypatch: pytest.MonkeyPatch) -> None:
    harmless = replace(MUTANTS["causal-one-extra"], name="harmless", fault="none")
    monkeypatch.setattr(Mutant, "make", lambda self: control(self.splits, self.tiling_known))
    only(harmless)
    rows = audit.audit()
    assert rows[0].caught == ()
    assert "SURVIVED" in text(rows)
    assert run(("causal-one-extra",)) == 1


def test_a_rejected_control_is_a_false_alarm(only, monkeypatch: pytest.MonkeyPatch) -> None:
    only(MUTANTS["lse-base-2"])
    monkeypatch.setattr(audit, "control", lambda *_: MUTANTS["lse-base-2"].make())
    rows = audit.audit()
    assert "forward.bound" in rows[0].false_alarms
    assert "UNSOUND" in text(rows)
