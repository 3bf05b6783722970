"""The readers that README and read.cpp offer give the same numbers as flashcheck's own."""

from __future__ import annotations

import re
import shutil
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flashcheck.golden.entry import GROUPS
from flashcheck.golden.record import exact_of, problem_of
from flashcheck.problem import OPTIONS
from tests.golden.conftest import FOLDER

LONGEST_READER = 25
"""Lines of the Python reader, blank ones not counted."""


def python_reader() -> str:
    text = (FOLDER / "README.md").read_text(encoding="utf-8")
    return re.search(r"```python\n(.*?)```", text, re.DOTALL)[1]  # type: ignore[index]


def test_the_python_reader_is_short() -> None:
    assert sum(bool(line.strip()) for line in python_reader().splitlines()) <= LONGEST_READER


def test_the_python_reader_reads_every_format(problems: dict[str, Any]) -> None:
    space: dict[str, Any] = {}
    exec(python_reader().partition("for problem in")[0], space)
    for problem in problems.values():
        built = problem_of(problem)
        for name, x in problem["inputs"].items():
            got = space["values"](x["bits"], x["format"], x["shape"])
            expected = getattr(built, name)
            expected = expected.numpy() if x["format"] == "bool" else expected.double().numpy()
            assert got.shape == expected.shape
            assert np.array_equal(got, expected, equal_nan=name != "mask"), (problem["id"], name)
        out = problem["expected"]["out"]
        for fmt in ("fp64", "fp32", "fp16", "bf16"):
            space["values"](out[fmt], fmt, out["shape"])


def test_the_python_reader_runs_as_printed(tmp_path: Path) -> None:
    script = tmp_path / "reader.py"
    script.write_text(python_reader(), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, str(script), str(FOLDER / "vectors" / "ordinary.json")],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.startswith("ordinary.fp32.4x4 (1, 1, 4, 4) ")


@pytest.fixture(scope="module", name="compiled")
def _compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("g++")
    assert compiler, "g++ is needed: golden/read.cpp is part of what is tested (Debian package g++)"
    binary = tmp_path_factory.mktemp("reader") / "read"
    flags = ["-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror"]
    subprocess.run([compiler, *flags, "-o", str(binary), str(FOLDER / "read.cpp")], check=True)
    return binary


def test_the_cpp_reader_gives_the_same_numbers(compiled: Path, problems: dict[str, Any]) -> None:
    paths = [str(FOLDER / "vectors" / f"{name}.bin") for name in GROUPS]
    done = subprocess.run([str(compiled), *paths], capture_output=True, text=True, check=True)
    lines = [line.split() for line in done.stdout.splitlines()]
    assert [line[0] for line in lines] == list(problems)
    recomputed = 0
    for name, worst, bits in lines:
        problem = problems[name]
        out = exact_of(problem["expected"]["out"]).flatten().tolist()
        assert bits == (struct.pack(">d", out[0]).hex() if out else "0" * 16)
        if name.startswith(("ordinary.", "grouped.")):
            # In double: n roundings of scores up to 40, then of sums of values up to 500 (e5m2).
            assert 0.0 <= float(worst) < 1e-12 * max(1.0, max(map(abs, out))), name
            recomputed += 1
        if set(problem_of(problem).options()) - {"scale"} and set(OPTIONS):
            assert float(worst) == -1
    assert recomputed >= 60


def test_the_cpp_reader_refuses_another_file(compiled: Path, tmp_path: Path) -> None:
    bad = tmp_path / "bad.bin"
    bad.write_bytes(b"something else")
    done = subprocess.run([str(compiled), str(bad)], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "not a golden file" in done.stderr
