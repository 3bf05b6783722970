"""The pytest plugin, in pytest runs of its own: ids, failures, known failures, xdist, JUnit, quietness."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from collections.abc import Callable
from pathlib import Path

import pytest

import flashcheck.pytest_plugin.cases
import tests.interface.subjects  # noqa: F401 - pytester forgets what a run imports; torch bears it once
from flashcheck.report.certificate import Certificate, read
from tests.plugin.loading import LOAD_PLUGIN

ROOT = Path(__file__).parents[2]
SUBJECTS = "tests.interface.subjects"
pytest_plugins = ["pytester"]

TEST_FILE = f"""
import flashcheck

@flashcheck.parametrize_with_checks(["{SUBJECTS}:honest", "{SUBJECTS}:wrong_lse"])
def test_attention(kernel, check):
    check(kernel)
"""


Run = Callable[..., tuple[int, str]]
OPTIONS = (
    *LOAD_PLUGIN,
    "--flashcheck-level",
    "quick",
    "--flashcheck-max-cases",
    "5",
    "-rA",
)


@pytest.fixture(name="run")
def _run(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs pytest in an empty folder; returns (exit code, output). In this process, unless ``apart``:
    importing torch anew for every run would take minutes."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))

    def run(*arguments: str, files: dict[str, str] | None = None, apart: bool = False) -> tuple[int, str]:
        for name, text in (files or {}).items():
            (pytester.path / name).write_text(text)
        method = pytester.runpytest_subprocess if apart else pytester.runpytest_inprocess
        result = method(*OPTIONS, *arguments)
        return int(result.ret), result.stdout.str() + result.stderr.str()

    return run


def _outcomes(text: str) -> dict[str, str]:
    """Test id's part in brackets -> PASSED, FAILED, ..."""
    return {
        match[2]: match[1]
        for match in re.finditer(r"^(PASSED|FAILED|XFAIL|XPASS|ERROR) \S*?\[(\S+?)\](?:@\S+)?", text, re.M)
    }


def test_ids_failures_summary_junit_and_report(run: Run, pytester: pytest.Pytester) -> None:
    code, text = run(
        "--junitxml=r.xml", "--flashcheck-report", "certificates", files={"test_mine.py": TEST_FILE}
    )
    assert code == 1, text
    outcomes = _outcomes(text)
    assert outcomes[f"{SUBJECTS}:honest-forward.bound-bf16"] == "PASSED"
    assert outcomes[f"{SUBJECTS}:wrong_lse-forward.bound-bf16"] == "FAILED"
    assert outcomes[f"{SUBJECTS}:wrong_lse-bitwise.repeat-bf16"] == "PASSED"
    assert outcomes[f"{SUBJECTS}:honest-coverage-bf16"] == "FAILED"  # 5 problems do not cover everything
    assert not any("backward" in key for key in outcomes)
    assert "LSE is in base 2" in text
    assert "Traceback" not in text
    failure = text.split("wrong_lse-forward.bound-bf16] ")[1].split("____")[1]
    assert len(failure.strip().splitlines()) <= 13
    assert re.search(rf"{SUBJECTS}:wrong_lse +bf16 +REJECTED +worst margin \S+ \(LSE\)  rms ratio", text)
    assert re.search(rf"{SUBJECTS}:honest +bf16 +INCOMPLETE", text)
    cases = ET.parse(pytester.path / "r.xml").getroot().iter("testcase")
    (case,) = [c for c in cases if "wrong_lse-forward.bound" in (c.get("name") or "")]
    properties = {p.get("name"): p.get("value") for p in case.iter("property")}
    assert properties["dtype"] == "bf16"
    assert float(properties["margin_LSE"] or 0) > 1
    assert "outside its proved bound" in (next(case.iter("failure")).text or "")
    certificate = read(pytester.path / "certificates" / "tests.interface.subjects-wrong_lse.json")
    assert isinstance(certificate, Certificate)
    assert certificate.verdict == "rejected"
    assert certificate.kernel.load_name == f"{SUBJECTS}:wrong_lse"


def test_workers_judge_each_group_once(run: Run, pytester: pytest.Pytester) -> None:
    counter = f"""
import os, torch
from tests.checks.subjects import attend, kernel
def counted(problem):
    with open({str(pytester.path / "calls")!r}, "a") as file:
        file.write(f"{{os.getpid()}} {{problem.format.name}} {{problem.seed}}\\n")
    return attend(problem)
subject = kernel(counted, dtypes=("bf16", "fp32"), head_dim=(8, 32))
"""
    test = "import flashcheck\n@flashcheck.parametrize_with_checks(['counted.py:subject'])\n"
    test += "def test_it(kernel, check):\n    check(kernel)\n"
    code, text = run(
        "-n",
        "2",
        "-k",
        "not coverage",
        "-p",
        "no:cacheprovider",
        files={"counted.py": counter, "test_counted.py": test},
        apart=True,
    )
    assert code == 0, text
    calls = [line.split() for line in (pytester.path / "calls").read_text().splitlines()]
    for dtype in ("bf16", "fp32"):
        assert len({pid for pid, name, _ in calls if name == dtype}) == 1, "one worker judges a group"
    assert re.search(r"counted.py:subject +fp32 +INCOMPLETE", text)


def test_known_failures_are_strict(run: Run) -> None:
    known = '[[known]]\ncheck = "forward.bound"\nkernel = "{}"\nreason = "LSE in base 2"\n'
    arguments = ("-k", "not coverage", "--flashcheck-known-failures", "known.toml")
    files = {"test_mine.py": TEST_FILE, "known.toml": known.format(f"{SUBJECTS}:wrong_lse")}
    code, text = run(*arguments, files=files)
    assert code == 0, text
    assert _outcomes(text)[f"{SUBJECTS}:wrong_lse-forward.bound-bf16"] == "XFAIL"
    assert "LSE in base 2" in text
    code, text = run(*arguments, files={"known.toml": known.format(f"{SUBJECTS}:honest")})
    assert code == 1
    assert "[XPASS(strict)] LSE in base 2" in text


@pytest.mark.parametrize(
    ("known", "words"),
    [
        ('[[known]]\ncheck = "forward.bond"\nreason = "x"\n', "forward.bond"),
        ('[[known]]\ncheck = "forward.bound"\n', "a table with reason"),
        ('[[known]]\ncheck = "forward.bound"\nreason = " "\n', "a text that is not empty"),
        ('[[known]]\ncheck = "forward.bound"\nreson = "x"\nreason = "x"\n', "did you mean reason"),
        ("[[knwon]]\n", "did you mean known"),
        ("[[", "valid TOML"),
    ],
)
def test_a_wrong_file_of_known_failures(known: str, words: str, tmp_path: Path) -> None:
    from types import SimpleNamespace

    from flashcheck.pytest_plugin.known import mark_known_failures

    group = SimpleNamespace(subject=SimpleNamespace(name="k"), dtype="bf16")
    case = flashcheck.pytest_plugin.cases.Case(None, group, "forward.bound")  # type: ignore[arg-type]
    item = SimpleNamespace(callspec=SimpleNamespace(params={"check": case}), add_marker=lambda _: None)
    (tmp_path / "known.toml").write_text(known)
    with pytest.raises(pytest.UsageError, match="flashcheck: ") as caught:
        mark_known_failures(tmp_path / "known.toml", [item])  # type: ignore[list-item]
    assert words in str(caught.value)


def test_conformance_without_a_test_file(run: Run) -> None:
    code, text = run(
        "--pyargs",
        "flashcheck.conformance",
        "--flashcheck-kernel",
        f"{SUBJECTS}:honest",
        "-k",
        "not coverage",
    )
    assert code == 0, text
    assert f"test_kernel[{SUBJECTS}:honest-forward.bound-bf16]" in text
    code, text = run("--pyargs", "flashcheck.conformance", "--flashcheck-kernel", f"{SUBJECTS}:honst")
    assert code != 0
    assert "did you mean honest" in text
    code, text = run("--pyargs", "flashcheck.conformance")
    assert code != 0
    assert "--flashcheck-kernel = none given" in text


CERTIFY_FILE = f"""
import pytest
from tests.interface import subjects

def test_honest(certify):
    certificate = certify(subjects.honest, complete=False)
    assert certificate.tensors[0].worst_margin <= 1

def test_wrong(certify):
    certify("{SUBJECTS}:wrong_lse", complete=False)

def test_incomplete(certify):
    certify(subjects.honest, max_cases=3)

def test_plain_callable(certify):
    certify(subjects.plain, dtype="fp32", max_cases=4, complete=False)

def test_typo(certify):
    with pytest.raises(ValueError, match="did you mean max_cases"):
        certify(subjects.honest, max_case=3)

def test_red(certify):
    certify(subjects.red)
"""


def test_the_certify_fixture_and_last_failed(run: Run) -> None:
    code, text = run(files={"test_certify.py": CERTIFY_FILE})
    assert code == 1
    for name, outcome in {
        "honest": "PASSED",
        "wrong": "FAILED",
        "incomplete": "FAILED",
        "plain_callable": "PASSED",
        "typo": "PASSED",
        "red": "FAILED",
    }.items():
        assert re.search(rf"^{outcome} test_certify.py::test_{name}\b", text, re.M), (name, text)
    assert "the judge failed: self-test: bf16 products are wrong" in text, text
    assert "LSE is in base 2" in text
    assert text.count("subject                             bf16") == 3, "objects of one name are told apart"
    code, text = run("--lf")
    assert "3 failed" in text
    assert "passed" not in text.splitlines()[-1]


def test_a_fault_of_the_judge_is_an_error(run: Run) -> None:
    test = f"import flashcheck\n@flashcheck.parametrize_with_checks(['{SUBJECTS}:red'])\n"
    test += "def test_it(kernel, check):\n    check(kernel)\n"
    code, text = run("-k", "forward.bound", files={"test_red.py": test})
    assert code == 1
    assert "1 error" in text
    assert "the judge failed" in text


def test_quiet_unless_used(run: Run) -> None:
    """Loading the plugin imports nothing heavy, makes no file and prints no line."""
    test = """
import sys

def test_nothing_heavy():
    heavy = ("torch", "triton", "hypothesis", "pydantic", "numpy", "rich", "jinja2", "flashcheck.kernel")
    assert "flashcheck.pytest_plugin" in sys.modules
    assert [m for m in heavy if m in sys.modules] == []
"""
    code, text = run("-p", "no:hypothesispytest", files={"test_other.py": test}, apart=True)
    assert code == 0, text
    assert "- flashcheck -" not in text


def test_hypothesis_profiles_of_others_stay_as_they_are(run: Run) -> None:
    test = f"""
import hypothesis
before = hypothesis.settings().max_examples, hypothesis.settings.get_current_profile_name()

def test_it(certify):
    certify("{SUBJECTS}:honest", complete=False, max_cases=2)
    assert before == (hypothesis.settings().max_examples, hypothesis.settings.get_current_profile_name())
"""
    code, text = run(files={"test_settings.py": test})
    assert code == 0, text
