"""The tutorial's files and commands, run in its order."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from tests.plugin.loading import LOAD_PLUGIN

pytest_plugins = ["pytester"]
TUTORIAL = Path(__file__).parents[2] / "flashcheck" / "report" / "TUTORIAL.md"

GUESS = "causal masking is off by one: a row does not see the key on the diagonal"

EXPECTED = {  # command's start -> exit code, words of its output
    "flashcheck certify sliding.py": (3, ("INCOMPLETE", "not judged, fp32: ")),
    "sed ": (0, ()),
    "flashcheck certify broken.py": (1, ("REJECTED", GUESS)),
    "flashcheck report bad.json --markdown": (
        0,
        ("❌ **REJECTED**", "flashcheck verify bad.json --problem "),
    ),
    "pytest ": (0, ("passed", "INCOMPLETE")),
    "flashcheck compare": (1, ("REGRESSED", "incomplete became rejected")),
    "flashcheck report good.json bad.json --html": (0, ("report.html",)),
}


def _blocks() -> list[tuple[str, str]]:
    """(info string, text) of every fenced block."""
    return re.findall(r"^```([^\n]*)\n(.*?)^```$", TUTORIAL.read_text(encoding="utf-8"), re.M | re.S)


def test_the_tutorial_does_what_it_says(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    pytester: pytest.Pytester,
) -> None:
    monkeypatch.chdir(tmp_path)
    run = set()
    assert GUESS in TUTORIAL.read_text(encoding="utf-8")
    for info, text in _blocks():
        if info == "python":
            name = re.match(r"# (\S+\.py)\n", text)
            assert name is not None
            (tmp_path / name[1]).write_text(text)
        elif info == "sh":  # "sh slow" is left to the reader: its command is tested with fewer problems
            for line in text.splitlines():
                (key,) = [start for start in EXPECTED if line.startswith(start)]
                run.add(key)
                code, out = _run(line, capfd, pytester, tmp_path)
                wanted, words = EXPECTED[key]
                assert code == wanted, (line, out)
                for word in words:
                    assert word in out, (line, word, out)
                for again in re.findall(r"`(flashcheck verify [^`]+)`", out)[:1]:
                    code, out = _run(again, capfd, pytester, tmp_path)
                    assert code == 1
                    assert GUESS in out
    assert run == set(EXPECTED), "every expected command stands in the tutorial"


def _run(
    line: str, capfd: pytest.CaptureFixture[str], pytester: pytest.Pytester, folder: Path
) -> tuple[int, str]:
    """In this process where it can be: importing torch anew takes seconds."""
    words = shlex.split(line)
    if words[0] == "flashcheck":
        from flashcheck.cli import main

        with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # flex_attention says that it is not compiled
            patch.setattr(sys, "argv", words)
            capfd.readouterr()
            with pytest.raises(SystemExit) as ended:
                main()
        out, err = capfd.readouterr()
        return int(ended.value.code or 0), out + err
    if words[0] == "pytest":
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(folder)
            result = pytester.runpytest_inprocess(
                *LOAD_PLUGIN, "-W", "ignore", f"--rootdir={folder}", *words[1:]
            )
        return int(result.ret), result.stdout.str()
    done = subprocess.run(line, shell=True, cwd=folder, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr
