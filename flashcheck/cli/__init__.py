"""The command line, one file a command.

Thin: heavy imports happen inside the commands, so that help is immediate.
"""

from __future__ import annotations

import sys

import typer

# Importing a command registers it; help shows this order.
from flashcheck.cli import audit, certify, compare, fuzz, golden, init, listing, probe, replay, report, verify
from flashcheck.cli.app import USAGE, app
from flashcheck.errors import ArgumentError

__all__ = [
    "app",
    "audit",
    "certify",
    "compare",
    "fuzz",
    "golden",
    "init",
    "listing",
    "main",
    "probe",
    "replay",
    "report",
    "verify",
]


def main() -> None:
    """Entry point: an argument outside its legal set is one line on stderr and exit code 2."""
    try:
        app()
    except ArgumentError as error:
        typer.echo(f"flashcheck: {error}", err=True)
        sys.exit(USAGE)
    except KeyboardInterrupt:
        sys.exit(130)
