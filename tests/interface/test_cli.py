"""The command line: exit codes, what goes to stdout and stderr, error texts, the certificate's file."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from flashcheck.certify import Progress, Verdict
from flashcheck.loading import load
from flashcheck.plan import make_plan
from flashcheck.report.certificate import Certificate
from flashcheck.workers import certify_by_name

ROOT = Path(__file__).parents[2]
SUBJECTS = "tests.interface.subjects"


@dataclass
class Done:
    """What a finished command left."""

    returncode: int
    stdout: str
    stderr: str


Run = Callable[..., Done]
Certify = Callable[..., tuple[Done, Certificate]]


@pytest.fixture(name="flashcheck")
def _flashcheck(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Done]:
    """Runs the command line in this process: importing torch anew for every test would take minutes."""

    def run(*arguments: str, cwd: Path = ROOT) -> Done:
        from flashcheck.cli import main

        monkeypatch.chdir(cwd)
        monkeypatch.setattr(sys, "argv", ["flashcheck", *arguments])
        monkeypatch.setenv("TRITON_INTERPRET", "1")
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = capfd.readouterr()
        return Done(int(ended.value.code or 0), out, err)

    return run


@pytest.fixture(name="certify")
def _certify(flashcheck: Callable[..., Done], tmp_path: Path) -> Callable[..., tuple[Done, Certificate]]:
    """Certifies a subject at level quick; returns what it left and the certificate."""

    def run(subject: str, *more: str) -> tuple[Done, Certificate]:
        path = tmp_path / "certificate.json"
        done = flashcheck("certify", f"{SUBJECTS}:{subject}", "--level", "quick", "--out", str(path), *more)
        return done, Certificate.from_json(path.read_text())

    return run


def test_certified(certify: Certify) -> None:
    done, certificate = certify("honest", "-v")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    lines = done.stdout.rstrip().splitlines()
    assert lines[-3].startswith("CERTIFIED")
    assert lines[-2].endswith("certificate.json")
    assert lines[-1].endswith(f"flashcheck certify {SUBJECTS}:honest")
    assert "worst margin" in done.stdout
    assert "median bound / |error|" in done.stdout
    assert certificate.verdict == "certified"
    assert {(t.dtype, t.tensor) for t in certificate.tensors} == {("bf16", "O"), ("bf16", "LSE")}
    assert all(t.worst_margin <= 1 for t in certificate.tensors)
    assert certificate.coverage.missing == {}


def test_rejected_with_a_diagnosis(certify: Certify) -> None:
    done, certificate = certify("wrong_lse")
    assert done.returncode == 1
    assert "forward.bound" in done.stdout
    assert "LSE is in base 2" in done.stdout
    assert done.stdout.rstrip().splitlines()[-3].startswith("REJECTED")
    (finding,) = certificate.findings
    assert finding.where is not None
    assert finding.where.tensor == "LSE"
    assert float.fromhex(finding.where.got) == pytest.approx(
        1.4427 * float.fromhex(finding.where.exact), rel=1e-3
    )


def test_an_infinite_margin_survives_the_file(certify: Certify, tmp_path: Path) -> None:
    done, certificate = certify("nan")
    assert done.returncode == 1
    data = json.loads((tmp_path / "certificate.json").read_text())
    assert data["tensors"][0]["worst_margin"] == "Infinity"
    assert certificate.tensors[0].worst_margin == float("inf")
    assert Certificate.from_json(certificate.to_json()) == certificate


def test_a_kernel_that_refuses_what_it_declares_is_rejected(certify: Certify) -> None:
    done, certificate = certify("refuses")
    assert done.returncode == 1
    assert "raised NotImplementedError: no causal masks yet" in done.stdout
    assert "causal=top_left" in certificate.coverage.missing["bf16"]
    said = {f.check: f.message for f in certificate.findings}
    assert set(said) == {"forward.bound", "state.interleaved"}  # the latter makes a causal call beside each
    assert said["state.interleaved"].startswith("another call, with causal=top_left: the kernel raised")


def test_incomplete_says_what_is_missing(certify: Certify) -> None:
    done, certificate = certify("two_dtypes", "--dtype", "bf16")
    assert done.returncode == 3
    assert "not judged, fp32: the whole dtype" in done.stdout
    assert certificate.verdict == "incomplete"
    done, certificate = certify("honest", "--max-cases", "3")
    assert done.returncode == 3
    assert "values mixed" in certificate.coverage.missing["bf16"]
    done, certificate = certify("honest", "--max-time", "0s")
    assert done.returncode == 3
    assert "time limit" in certificate.run.stopped


def test_a_red_self_test_is_the_judges_failure(certify: Certify) -> None:
    done, certificate = certify("red")
    assert done.returncode == 4
    assert "bf16 products are wrong on this platform" in done.stdout
    assert certificate.run.judged == 0


def test_ctrl_c_writes_what_was_judged(certify: Certify) -> None:
    done, certificate = certify("interrupted")
    assert done.returncode == 130
    assert 0 < certificate.run.judged < certificate.run.planned
    assert "interrupted" in certificate.run.stopped


def test_ctrl_c_ends_every_process_and_those_that_have_not_begun() -> None:
    """Two workers, three dtypes, an interrupt that reaches only this process."""
    name = "tests.interface.subjects:three_dtypes"
    kernel = load(name)
    plan = make_plan(kernel, "standard")

    def interrupt(_: Progress) -> None:
        raise KeyboardInterrupt

    outcome = certify_by_name(name, kernel, plan, on_progress=interrupt, workers=2)
    assert outcome.interrupted
    assert 0 < outcome.judged < len(plan.cases)
    assert outcome.verdict is Verdict.INCOMPLETE
    assert set(outcome.missing) == {"fp16", "bf16", "fp32"}
    assert "interrupted" in outcome.stopped


def test_quiet_prints_the_last_lines_alone(certify: Certify) -> None:
    done, _ = certify("honest", "-q", "--max-cases", "2")
    assert len(done.stdout.splitlines()) == 3


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("certify", "torch.sdpa.flsh"), "did you mean torch.sdpa.flash"),
        (("certify", f"{SUBJECTS}:honst"), "did you mean honest"),
        (("certify", "no.such.module:x"), "importable module"),
        (("certify", "nowhere.py:x"), "where the file exists"),
        (("certify", f"{SUBJECTS}:SMALL"), "a Kernel or a callable"),
        (("certify", f"{SUBJECTS}:honest", "--level", "quik"), "did you mean quick"),
        (("certify", f"{SUBJECTS}:honest", "--dtype", "bf61"), "did you mean bf16"),
        (("certify", f"{SUBJECTS}:honest", "--device", "tpu"), "--device = tpu"),
        (("certify", f"{SUBJECTS}:honest", "--max-time", "soon"), "--max-time = 'soon'"),
        (("certify", f"{SUBJECTS}:honest", f"{SUBJECTS}:red", "--out", "x.json"), "--out"),
        (("list", "kernel"), "did you mean kernels"),
    ],
)
def test_wrong_usage_is_one_line_and_exit_code_2(
    flashcheck: Run, arguments: tuple[str, ...], words: str
) -> None:
    done = flashcheck(*arguments)
    assert done.returncode == 2
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("flashcheck: ")
    assert words in line


def test_no_kernel_and_no_table(flashcheck: Run, tmp_path: Path) -> None:
    done = flashcheck("certify", cwd=tmp_path)
    assert done.returncode == 2
    assert "[tool.flashcheck]" in done.stderr


def test_unknown_options_are_typers_own_errors(flashcheck: Run) -> None:
    assert flashcheck("certify", "--levle", "quick").returncode == 2


def test_the_table_in_pyproject_names_the_kernel(flashcheck: Run, tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text(
        f'[tool.flashcheck]\nkernels = ["{SUBJECTS}:honest"]\nlevel = "quick"\n'
    )
    done = flashcheck("certify", "--max-cases", "2", "-q", cwd=tmp_path)
    assert done.returncode == 3, done.stderr
    (path,) = (tmp_path / ".flashcheck" / "certificates").glob("*.json")
    assert Certificate.from_json(path.read_text()).run.level == "quick"
    assert (tmp_path / ".flashcheck" / ".gitignore").read_text() == "*\n"
    (tmp_path / "pyproject.toml").write_text('[tool.flashcheck]\nkernel = "x"\n')
    done = flashcheck("certify", cwd=tmp_path)
    assert done.returncode == 2
    assert "did you mean kernels" in done.stderr


def test_a_plain_callable_is_enough(certify: Certify) -> None:
    done, certificate = certify("plain", "--max-cases", "4", "--dtype", "fp32")
    assert done.returncode == 3
    assert certificate.findings == []


def test_list_shows_every_registry(flashcheck: Run) -> None:
    done = flashcheck("list")
    assert done.returncode == 0
    for word in ("torch.sdpa.math", "forward.bound", "huge_logits", "e5m2"):
        assert word in done.stdout


def test_help_and_version_do_not_import_torch() -> None:
    code = (
        "import sys; sys.argv = ['flashcheck', '{}']\n"
        "from flashcheck.cli import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "bad = [m for m in ('torch', 'triton', 'hypothesis', 'pydantic') if m in sys.modules]\n"
        "sys.exit(str(bad) if bad else 0)"
    )
    for argument in ("--help", "--version"):
        done = subprocess.run(
            [sys.executable, "-c", code.format(argument)],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert "flashcheck" in done.stdout
