"""Runs and prints the audit."""

from __future__ import annotations

from rich.console import Console

from flashcheck.audit import audit
from flashcheck.report.audit_table import print_audit


def run_audit(stdout: Console) -> int:
    """Audits the checks; 1 where a mutant survived its check or the control was rejected."""
    rows = audit()
    print_audit(stdout, rows)
    return 0 if rows and all(row.good for row in rows) else 1
