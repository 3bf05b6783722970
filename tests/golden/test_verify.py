"""``golden verify``: passes on the recorded vectors, and every route notices a wrong digit."""

from __future__ import annotations

import copy
import shutil
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from flashcheck.commands.golden import run_verify
from flashcheck.golden import verify
from flashcheck.golden.entry import GROUPS, Entry
from tests.golden.conftest import FOLDER

SAMPLE = 16


def test_a_sample_agrees_in_every_digit() -> None:
    chosen = verify.sample(FOLDER, SAMPLE, seed=3)
    done = verify.verify(chosen, lambda *_: None)
    assert done.faults == ()
    assert done.problems == SAMPLE


def pair(problems: dict[str, Any], name: str) -> tuple[Any, Entry]:
    entry = next(e for e in GROUPS[name.split(".", maxsplit=1)[0]].entries() if e.id == name)
    return copy.deepcopy(problems[name]), entry


@pytest.fixture(name="good")
def _good(problems: dict[str, Any]) -> tuple[Any, Entry]:
    return pair(problems, "options.bf16.sink")


def faults(data: Any, entry: Entry) -> list[str]:
    return list(verify.faults_of(data, entry))


def last_digit(text: str) -> str:
    """The text with the last digit of its first full-length number changed by one."""
    words = text.split()
    at = next(n for n, word in enumerate(words) if len(word.partition("e")[0].strip("-")) == 31)
    mantissa, _, exponent = words[at].partition("e")
    words[at] = f"{mantissa[:-1]}{'1' if mantissa[-1] != '1' else '2'}e{exponent}"
    return " ".join(words)


def test_nothing_is_wrong_with_a_good_one(good: tuple[Any, Entry]) -> None:
    assert faults(*good) == []


@pytest.mark.parametrize("tensor", ["out", "lse", "dq", "dk", "dv", "dsink", "dscale"])
def test_both_routes_notice_the_thirtieth_digit(good: tuple[Any, Entry], tensor: str) -> None:
    data, entry = good
    data["expected"][tensor]["digits"] = last_digit(data["expected"][tensor]["digits"])
    found = faults(data, entry)
    assert any("first route" in fault for fault in found)
    assert any("mpmath gives" in fault for fault in found)


@pytest.mark.parametrize("fmt", ["fp64", "fp32", "fp16", "bf16"])
def test_a_flipped_bit_is_noticed(good: tuple[Any, Entry], fmt: str) -> None:
    data, entry = good
    bits = data["expected"]["out"][fmt]
    data["expected"]["out"][fmt] = f"{int(bits[:2], 16) ^ 1:02x}{bits[2:]}"
    found = faults(data, entry)
    assert any("rounded" in fault for fault in found)
    assert any("first route" in fault for fault in found)


def test_another_input_is_noticed(good: tuple[Any, Entry]) -> None:
    data, entry = good
    bits = data["inputs"]["q"]["bits"]
    data["inputs"]["q"]["bits"] = f"{int(bits[:2], 16) ^ 1:02x}{bits[2:]}"
    found = faults(data, entry)
    assert any("not what the seed gives" in fault for fault in found)
    assert any("mpmath gives" in fault for fault in found)


def test_what_nan_reaches_is_checked(problems: dict[str, Any]) -> None:
    data, entry = pair(problems, "nonfinite.fp16.nan-k")
    assert faults(data, entry) == []
    digits = data["expected"]["out"]["digits"].split()
    digits[digits.index("nan")] = "1e0"
    data["expected"]["out"]["digits"] = " ".join(digits)
    assert any("NaN or inf is visible" in fault for fault in faults(data, entry))


@pytest.fixture(name="copy_of_vectors")
def _copy(tmp_path: Path) -> Path:
    shutil.copytree(FOLDER / "vectors", tmp_path / "vectors")
    shutil.copy(FOLDER / "manifest.json", tmp_path)
    return tmp_path


def test_a_damaged_file_fails_before_anything_is_computed(copy_of_vectors: Path) -> None:
    path = copy_of_vectors / "vectors" / "ties.json"
    path.write_text(path.read_text(encoding="utf-8").replace("1", "2", 1), encoding="utf-8")
    console = Console(record=True, quiet=True, width=200)
    assert run_verify(copy_of_vectors, 1, 0, console, console) == 1
