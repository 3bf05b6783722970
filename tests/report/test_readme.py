"""README: tables are what the files say, code runs, links lead somewhere, the two commands stand."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.report.audit_figure import FIGURE, drawn
from tests.report.readme import AUDIT, README, ROOT, TABLES, faults_table, recorded_table

TEXT = README.read_text(encoding="utf-8")
DOCUMENTS = ("README.md", "flashcheck/report/CI.md", "flashcheck/report/TUTORIAL.md")


def _counts(text: str) -> dict[str, int]:
    return {check: int(count) for check, count in re.findall(r"^\| `?([a-z_.]+)`? \| (\d+) \|$", text, re.M)}


def test_the_tables_claim_no_more_than_there_is() -> None:
    """A new fault or certificate need not stand there yet; what stands there must be true."""
    wrong = "write them anew: python -m tests.report.readme"
    there = _counts(faults_table())
    claimed = _counts(TEXT)
    assert claimed["all"] > 20
    assert all(count <= there.get(check, 0) for check, count in claimed.items()), wrong
    rows = [line for line in TEXT.splitlines() if "](golden/certificates/" in line]
    assert rows
    assert set(rows) <= set(recorded_table().splitlines()), wrong


@pytest.mark.parametrize("name", ["patches", "kills", "precision", "rivals"])
def test_what_is_told_of_the_audit_is_what_was_recorded(name: str) -> None:
    block = re.search(rf"<!-- {name}: [^\n]*-->\n(.*?)\n<!-- end -->", TEXT, re.S)
    assert block is not None
    assert block[1] == TABLES[name](), "write it anew: python -m tests.report.readme"


def test_the_figure_shows_what_was_recorded() -> None:
    audit = json.loads(AUDIT.read_text(encoding="utf-8"))
    assert FIGURE.read_text(encoding="utf-8") == drawn(audit), "python -m tests.report.audit_figure"


def test_the_two_commands_stand() -> None:
    commands = re.findall(r"^python3 -m venv .*$", TEXT, re.M)
    assert len(commands) == 2
    assert commands[0].endswith("pip install -e . && .venv/bin/flashcheck certify")
    assert commands[1].endswith("pip install -e '.[test]' && .venv/bin/pytest -q -n 2")
    assert "grep -m 1 -F \"pip install -e '.[test]'\" README.md" in (ROOT / ".ci" / "run").read_text()


@pytest.mark.parametrize("name", DOCUMENTS)
def test_links_lead_somewhere(name: str) -> None:
    document = ROOT / name
    links = re.findall(r"\]\(([^)#]+)\)", document.read_text(encoding="utf-8"))
    for link in links:
        if not link.startswith("http"):
            assert (document.parent / link).exists(), link


def test_the_kernel_of_the_readme_is_judged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from flashcheck.certify import certify
    from flashcheck.loading import load
    from flashcheck.plan import make_plan

    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"^```python\n(# (\S+)\n.*?)^```", TEXT, re.M | re.S)
    assert [name for _, name in blocks] == ["mine.py", "test_mine.py"]
    for text, name in blocks:
        (tmp_path / name).write_text(text)
        compile(text, name, "exec")
    kernel = load("mine.py:attention")
    outcome = certify(kernel, make_plan(kernel, "quick", ("fp32",), max_cases=4))
    assert outcome.findings == []
    assert outcome.judge_faults == []
    assert outcome.judged == 4
