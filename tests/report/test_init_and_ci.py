"""``flashcheck init`` overwrites nothing; the action and the snippets call what exists."""

from __future__ import annotations

import io
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from rich.console import Console

from flashcheck.cli import app
from flashcheck.commands.init import run_init
from flashcheck.errors import ArgumentError

yaml = pytest.importorskip("yaml")

ROOT = Path(__file__).parents[2]
KERNEL = "mine.attention:flash"


def _init(folder: Path, kernel: str | None = KERNEL) -> str:
    console = Console(file=(out := io.StringIO()), width=200)
    assert run_init(folder, kernel, "owner/repo@v1", console) == 0
    return out.getvalue()


def _contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_a_starter_in_an_empty_folder(tmp_path: Path) -> None:
    text = _init(tmp_path)
    assert text.count("wrote") == 3
    files = _contents(tmp_path)
    assert set(files) == {
        "tests/test_attention_numerics.py",
        ".github/workflows/flashcheck.yml",
        "pyproject.toml",
    }
    assert tomllib.loads(files["pyproject.toml"].decode())["tool"]["flashcheck"]["kernels"] == [KERNEL]
    assert all(b"@KERNEL@" not in x and b"@ACTION@" not in x for x in files.values())
    compile(files["tests/test_attention_numerics.py"], "test", "exec")
    steps = yaml.safe_load(files[".github/workflows/flashcheck.yml"])["jobs"]["certify"]["steps"]
    assert steps[-1]["uses"] == "owner/repo@v1"
    action = yaml.safe_load((ROOT / "action.yml").read_text())
    assert set(steps[-1]["with"]) <= set(action["inputs"])


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    _init(tmp_path)
    before = _contents(tmp_path)
    assert _init(tmp_path, "other:kernel").count("kept") == 3
    assert _contents(tmp_path) == before


def test_a_table_is_appended_and_the_rest_stays(tmp_path: Path) -> None:
    own = b'[project]\nname = "mine"  # comment\n\n[tool.ruff]\nline-length = 99'
    (tmp_path / "pyproject.toml").write_bytes(own)
    _init(tmp_path)
    text = (tmp_path / "pyproject.toml").read_bytes()
    assert text.startswith(own)
    assert tomllib.loads(text.decode())["tool"]["flashcheck"]["level"] == "standard"


def test_wrong_usage(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="DIR"):
        _init(tmp_path / "nowhere")
    with pytest.raises(ArgumentError, match="--kernel"):
        _init(tmp_path, "mine")
    (tmp_path / "pyproject.toml").write_text("[[")
    with pytest.raises(ArgumentError, match="valid TOML"):
        _init(tmp_path)


def _commands(text: str) -> set[tuple[str, tuple[str, ...]]]:
    """(sub-command, long options) of every ``flashcheck`` call in a text."""
    calls = re.findall(r"flashcheck ((?:certify|verify|compare|report|init|list|audit)\b[^\n|`]*)", text)
    return {(c.split()[0], tuple(re.findall(r"(--[a-z-]+)", c))) for c in calls}


@pytest.mark.parametrize("name", ["action.yml", "README.md", "flashcheck/report/CI.md"])
def test_documents_name_commands_and_options_that_exist(name: str) -> None:
    import typer.main

    known = {
        command: {o for p in c.params for o in p.opts}
        for command, c in typer.main.get_command(app).commands.items()  # type: ignore[attr-defined]
    }
    calls = _commands((ROOT / name).read_text())
    assert calls
    for command, options in calls:
        assert command in known
        assert set(options) <= known[command] | {"--help"}, (command, options)


def test_the_actions_shell_is_valid() -> None:
    steps = yaml.safe_load((ROOT / "action.yml").read_text())["runs"]["steps"]
    scripts = [step["run"] for step in steps if "run" in step]
    assert len(scripts) > 4
    for script in scripts:
        assert "${{" not in script, "inputs reach a script through its environment alone"
        done = subprocess.run(["bash", "-n", "-c", script], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
    for step in steps:
        assert "run" not in step or step["shell"] == "bash"


def test_the_actions_steps_run(tmp_path: Path) -> None:
    """Certify, report and compare as the action does them, on a small kernel."""
    steps = yaml.safe_load((ROOT / "action.yml").read_text())["runs"]["steps"]
    by_name = {step.get("name"): step for step in steps}
    (bin_folder := tmp_path / "bin").mkdir()
    (bin_folder / "flashcheck").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m flashcheck "$@"\n')
    (bin_folder / "flashcheck").chmod(0o755)
    environment = {
        "PATH": f"{bin_folder}:{Path(sys.executable).parent}:/usr/bin:/bin",
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "GITHUB_OUTPUT": str(tmp_path / "output"),
        "GITHUB_STEP_SUMMARY": str(tmp_path / "summary"),
        "KERNEL": "tests.interface.subjects:wrong_lse",
        "LEVEL": "quick",
        "DTYPES": "bf16",
        "DEVICE": "cpu",
        "FAIL_IF": "margin:10% rms:5%",
    }

    def step(name: str) -> int:
        command = ["bash", "-e", "-o", "pipefail", "-c", by_name[name]["run"]]
        return subprocess.run(command, cwd=tmp_path, env=environment, check=False).returncode

    assert step("Certify") == 0
    assert "code=1\nverdict=rejected" in (tmp_path / "output").read_text()
    ci, base = tmp_path / ".flashcheck" / "ci", tmp_path / ".flashcheck" / "base"
    assert {p.name for p in ci.iterdir()} == {"certificate.json", "report.html", "badge.json", "comment.md"}
    base.mkdir()
    (base / "certificate.json").write_text((ci / "certificate.json").read_text())
    assert step("Compare") == 0
    assert "NO REGRESSION" in (tmp_path / "summary").read_text()
