"""Runs and prints the audit, and on request the rules of other suites beside it."""

from __future__ import annotations

import itertools
import json
from dataclasses import asdict
from pathlib import Path

from rich.console import Console

from flashcheck import __version__
from flashcheck.audit import AuditRow, audit
from flashcheck.files import write_atomically
from flashcheck.mutants import MUTANTS, mutant_named
from flashcheck.report.audit_table import print_audit, print_rivals
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
        write_atomically(file, json.dumps(_data(rows, matrix), indent=1) + "\n")
    return 0 if rows and all(row.good for row in rows) else 1


def _data(rows: list[AuditRow], matrix: list[MatrixRow]) -> dict[str, object]:
    return {
        "flashcheck": __version__,
        "mutants": [asdict(row) | {"good": row.good} for row in rows],
        "rivals": [asdict(row) for row in matrix],
    }
