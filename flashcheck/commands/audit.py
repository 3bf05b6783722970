"""Runs and prints the audit, of emulated kernels or patched ones, and the rules of other suites beside it."""

from __future__ import annotations

import itertools
import json
from dataclasses import asdict
from pathlib import Path

from rich.console import Console

from flashcheck import __version__
from flashcheck.audit import AuditRow, EquivalentRow, audit, audit_patches
from flashcheck.devices import interpret_without_gpu
from flashcheck.errors import UnknownNameError
from flashcheck.files import write_atomically
from flashcheck.mutants import MUTANTS, mutant_named
from flashcheck.mutants.patches import read_patches
from flashcheck.report.audit_table import print_audit, print_equivalents, print_rivals
from flashcheck.report.counting import Counting
from flashcheck.rivals import MatrixRow, rival_matrix


def run_audit(
    names: tuple[str, ...], rivals: bool, file: Path | None, stdout: Console, stderr: Console
) -> int:
    """Audits the checks; 1 where a mutant survived its check or the control was rejected.

    Raises UnknownNameError for a mutant that does not exist.
    """
    mutants = tuple(mutant_named(name) for name in names) or tuple(MUTANTS.values())
    matrix: list[MatrixRow] = []
    done = itertools.count(1)
    with Counting(stderr, "mutants") as progress:
        rows = audit(mutants, on_row=lambda row: progress(next(done), len(mutants), row.mutant))
    if rivals:
        done = itertools.count(1)
        with Counting(stderr, "rules of other suites") as progress:
            matrix = rival_matrix(
                mutants, on_row=lambda row: progress(next(done), len(mutants) + 1, row.mutant)
            )
    print_audit(stdout, rows)
    if rivals:
        print_rivals(stdout, rows, matrix)
    if file is not None:
        _write(file, {"mutants": _rows(rows)} | ({"rivals": [asdict(m) for m in matrix]} if rivals else {}))
    return 0 if rows and all(row.good for row in rows) else 1


def run_patch_audit(
    folder: Path, names: tuple[str, ...], file: Path | None, stdout: Console, stderr: Console
) -> int:
    """Audits the checks with source patches; 1 also where a patch that is declared equivalent changes a bit.

    Raises ArgumentError for a folder without patches or a patch that does not apply, UnknownNameError for a
    name that no patch has.
    """
    interpret_without_gpu()
    patches = read_patches(folder)
    for name in names:
        if name not in patches:
            raise UnknownNameError("patch", name, patches)
    chosen = [patches[name] for name in names or patches]
    done = itertools.count(1)

    def on_row(row: AuditRow | EquivalentRow) -> None:
        progress(next(done), len(chosen), row.mutant if isinstance(row, AuditRow) else row.patch)

    with Counting(stderr, "patches") as progress:
        rows, equivalents = audit_patches(chosen, on_row)
    print_audit(stdout, rows)
    print_equivalents(stdout, equivalents)
    if file is not None:
        _write(file, {"patches": _rows(rows), "equivalents": [asdict(row) for row in equivalents]})
    good = all(row.good for row in rows) and not any(row.difference for row in equivalents)
    return 0 if chosen and good else 1


def _rows(rows: list[AuditRow]) -> list[dict[str, object]]:
    return [asdict(row) | {"good": row.good} for row in rows]


def _write(file: Path, parts: dict[str, object]) -> None:
    """Puts the parts into the file and keeps those that were not run this time."""
    old = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    whole = old | {"flashcheck": __version__} | parts
    write_atomically(file, json.dumps(whole, indent=1) + "\n")
