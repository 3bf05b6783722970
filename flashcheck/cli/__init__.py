"""The command line, one file a command.

Thin: heavy imports happen inside the commands, so that help is immediate.
"""

from __future__ import annotations

import sys

import typer

from flashcheck.cli import (  # importing a command registers it; help shows this order
    audit,
    certify,
    listing,
    probe,
)
from flashcheck.cli.app import USAGE, app
from flashcheck.errors import ArgumentError

__all__ = ["app", "audit", "certify", "listing", "main", "probe"]


def main() -> None:
    """Entry point: an argument outside its legal set is one line on stderr and exit code 2."""
    try:
        app()
    except ArgumentError as error:
        typer.echo(f"flashcheck: {error}", err=True)
        sys.exit(USAGE)
    except KeyboardInterrupt:
        sys.exit(130)
