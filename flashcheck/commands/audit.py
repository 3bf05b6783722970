"""Runs and prints the audit, of emulated kernels or patched ones, and what is asked for beside it."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from flashcheck import __version__
from flashcheck.audit import AuditRow, audit, audit_patches
from flashcheck.devices import interpret_without_gpu
from flashcheck.errors import UnknownNameError
from flashcheck.files import write_atomically
from flashcheck.grades import DTYPES, grade_all
from flashcheck.kills import Kill, hunt_mutants, hunt_patches
from flashcheck.mutants import MUTANTS, mutant_named
from flashcheck.mutants.losses import LOSSES
from flashcheck.mutants.patches import read_patches
from flashcheck.plan import LEVELS
from flashcheck.report.audit_table import (
    print_audit,
    print_equivalents,
    print_grades,
    print_kills,
    print_rivals,
)
from flashcheck.report.counting import Counting
from flashcheck.rivals import MatrixRow, rival_matrix


def run_audit(
    names: tuple[str, ...],
    rivals: bool,
    level: str | None,
    precision: bool,
    file: Path | None,
    stdout: Console,
    stderr: Console,
) -> int:
    """Audits the checks; 1 where a mutant survived its check or the control was rejected.

    Raises UnknownNameError for a mutant or a level that does not exist.
    """
    _known_level(level)
    mutants = tuple(mutant_named(name) for name in names) or tuple(MUTANTS.values())
    parts: dict[str, Any] = {}
    with Counting(stderr, "mutants") as progress:
        rows = audit(mutants, on_row=_counted(progress, len(mutants), lambda row: row.mutant))
    parts["mutants"] = _rows(rows)
    print_audit(stdout, rows)
    if rivals:
        with Counting(stderr, "rules of other suites") as progress:
            on_row: Callable[[MatrixRow], None] = _counted(progress, len(mutants) + 1, lambda r: r.mutant)
            matrix = rival_matrix(mutants, on_row=on_row)
        parts["rivals"] = [asdict(row) for row in matrix]
        print_rivals(stdout, rows, matrix)
    if level is not None:
        with Counting(stderr, f"mutants, level {level}") as progress:
            on_kill = _counted(progress, len(mutants), lambda k: k.mutant)
            kills = hunt_mutants(mutants, level, on_kill, _lesser(file, "mutants", level))
        _note_kills(parts, "mutants", level, kills, stdout)
    if precision:
        with Counting(stderr, "losses of precision") as progress:
            grades = grade_all(
                on_grade=_counted(progress, len(LOSSES) * len(DTYPES), lambda g: f"{g.loss}, {g.dtype}")
            )
        parts["precision"] = [asdict(grade) for grade in grades]
        print_grades(stdout, grades)
    if file is not None:
        _write(file, parts)
    return 0 if rows and all(row.good for row in rows) else 1


def run_patch_audit(
    folder: Path,
    names: tuple[str, ...],
    level: str | None,
    file: Path | None,
    stdout: Console,
    stderr: Console,
) -> int:
    """Audits the checks with source patches; 1 also where a patch that is declared equivalent changes a bit.

    Raises ArgumentError for a folder without patches or a patch that does not apply, UnknownNameError for a
    name that no patch has or a level that does not exist.
    """
    _known_level(level)
    interpret_without_gpu()
    patches = read_patches(folder)
    for name in names:
        if name not in patches:
            raise UnknownNameError("patch", name, patches)
    chosen = [patches[name] for name in names or patches]
    with Counting(stderr, "patches") as progress:
        on_row = _counted(
            progress, len(chosen), lambda r: r.mutant if isinstance(r, AuditRow) else r.patch
        )  # fmt: skip
        rows, equivalents = audit_patches(chosen, on_row)
    parts = {"patches": _rows(rows), "equivalents": [asdict(row) for row in equivalents]}
    print_audit(stdout, rows)
    print_equivalents(stdout, equivalents)
    if level is not None:
        with Counting(stderr, f"patches, level {level}") as progress:
            on_kill = _counted(progress, len(rows), lambda k: k.mutant)
            kills = hunt_patches(chosen, level, on_kill, _lesser(file, "patches", level))
        _note_kills(parts, "patches", level, kills, stdout)
    if file is not None:
        _write(file, parts)
    good = all(row.good for row in rows) and not any(row.difference for row in equivalents)
    return 0 if chosen and good else 1


def _known_level(level: str | None) -> None:
    if level is not None and level not in LEVELS:
        raise UnknownNameError("level", level, LEVELS)


def _counted(progress: Counting, total: int, name: Callable[[Any], str]) -> Callable[[Any], None]:
    """Counts up with every call."""
    done = itertools.count(1)
    return lambda row: progress(next(done), total, name(row))


def _rows(rows: Sequence[AuditRow]) -> list[dict[str, object]]:
    return [asdict(row) | {"good": row.good} for row in rows]


def _note_kills(parts: dict[str, Any], kind: str, level: str, kills: list[Kill], stdout: Console) -> None:
    parts["kills"] = {f"{kind}, {level}": [asdict(kill) | {"killed": kill.killed} for kill in kills]}
    print_kills(stdout, kills, level)


def _lesser(file: Path | None, kind: str, level: str) -> dict[str, Kill]:
    """What the file tells of level quick, by name; nothing where there is no file, or that is the level."""
    if file is None or not file.is_file() or level == "quick":
        return {}
    rows = json.loads(file.read_text(encoding="utf-8")).get("kills", {}).get(f"{kind}, quick", [])
    return {row["mutant"]: Kill.from_json(row) for row in rows}


def _write(file: Path, parts: dict[str, Any]) -> None:
    """Puts the parts into the file and keeps those that were not run this time."""
    old = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    if "kills" in parts:
        parts["kills"] = old.get("kills", {}) | parts["kills"]
    write_atomically(file, json.dumps(old | {"flashcheck": __version__} | parts, indent=1) + "\n")
