"""Source patches of the Triton kernels: all apply, change what they claim to, and are caught."""

from __future__ import annotations

import io
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from flashcheck.audit import audit_patches
from flashcheck.checks.fault_classes import FAULT_CLASSES
from flashcheck.commands.audit import run_patch_audit
from flashcheck.devices import interpret_without_gpu
from flashcheck.errors import ArgumentError, UnknownNameError
from flashcheck.loading import load
from flashcheck.mutants.patched import patched_kernel, patched_text
from flashcheck.mutants.patches import Patch, read_patches

interpret_without_gpu()

FOLDER = Path(__file__).parents[1] / "kernels" / "patches"
PATCHES = read_patches(FOLDER)
FAULTS = [p for p in PATCHES.values() if not p.equivalent]

HANDFUL = (
    "tail-mask-off-by-one",
    "accumulator-not-rescaled",
    "padding-values-read",
    "key-lengths-ignored-in-dkdv",
    "merge-last-part-lost",
    "key-scale-not-undone",
    "options-remembered-by-shape",
)
"""Of every file, and of checks that compare runs; ``flashcheck audit --patches`` runs all."""


@pytest.mark.parametrize("patch", PATCHES.values(), ids=PATCHES)
def test_the_patch_applies_and_what_it_gives_is_python(patch: Patch) -> None:
    compile(patched_text(patch), patch.file, "exec")


@pytest.mark.parametrize("name", HANDFUL)
def test_the_fault_is_caught_and_the_clean_kernel_is_not(name: str) -> None:
    (row,), _ = audit_patches([PATCHES[name]])
    assert row.good, row


def test_equivalent_patches_change_no_bit() -> None:
    faults, equivalents = audit_patches(p for p in PATCHES.values() if p.equivalent)
    assert not faults
    assert [row.difference for row in equivalents] == [""] * len(equivalents)
    assert all(row.proof for row in equivalents)


def test_a_fault_that_is_declared_equivalent_is_found_out() -> None:
    fault = replace(PATCHES["tail-mask-off-by-one"], equivalent="it is not", caught_by="")
    _, (row,) = audit_patches([fault])
    assert row.difference


def test_the_copy_stands_beside_the_clean_kernel() -> None:
    patch = PATCHES["scale-twice"]
    problem = patch.specs[-1].build()
    clean = load(patch.kernel)
    before = clean.forward(problem).out
    with patched_kernel(patch) as faulty:
        assert not faulty.forward(problem).out.equal(before)
        assert clean.forward(problem).out.equal(before)
    assert load(patch.kernel).forward(problem).out.equal(before)


def test_a_patch_whose_text_is_gone_or_ambiguous_says_so() -> None:
    patch = PATCHES["scale-twice"]
    with pytest.raises(ArgumentError, match=r"patch scale-twice = old text found 0 times in options\.py"):
        patched_text(replace(patch, old="no such line"))
    with pytest.raises(ArgumentError, match="times"):
        patched_text(replace(patch, old="scale"))
    with pytest.raises(ArgumentError, match=r"no file gone\.py"):
        patched_text(replace(patch, file="gone.py"))


def test_entries_say_what_they_are() -> None:
    assert len(FAULTS) >= 25
    assert {p.letter for p in PATCHES.values()} <= set(FAULT_CLASSES)
    for patch in FAULTS:
        assert patch.exposed_by, patch.name
        assert re.fullmatch(r"((\S+#\d+)(, \S+#\d+)*)?", patch.source), patch.name
        assert patch.old != patch.new


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('kernel = "kernels:x"\n[[patch]]\nname = "a"\n', "no class, fault"),
        ('kernel = "kernels:x"\n[[patch]]\ncolour = "a"\n', "key in bad.toml = 'colour'"),
        ("kernel = ", "valid TOML"),
    ],
)
def test_a_bad_file_is_named(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "bad.toml").write_text(text, encoding="utf-8")
    with pytest.raises(ArgumentError, match=message):
        read_patches(tmp_path)


def test_an_empty_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=r"a folder with \*\.toml files"):
        read_patches(tmp_path)


def test_the_command_records_what_ran_and_keeps_the_rest(tmp_path: Path) -> None:
    file = tmp_path / "audit.json"
    file.write_text('{"rivals": ["kept"], "patches": []}', encoding="utf-8")
    out = Console(file=io.StringIO(), width=200)
    assert run_patch_audit(FOLDER, ("tail-mask-off-by-one",), None, file, out, out) == 0
    data = json.loads(file.read_text(encoding="utf-8"))
    assert data["rivals"] == ["kept"]
    assert [row["mutant"] for row in data["patches"]] == ["tail-mask-off-by-one"]
    with pytest.raises(UnknownNameError, match="patch = 'tail-mask'"):
        run_patch_audit(FOLDER, ("tail-mask",), None, None, out, out)
    with pytest.raises(UnknownNameError, match="level = 'slow'"):
        run_patch_audit(FOLDER, (), "slow", None, out, out)
