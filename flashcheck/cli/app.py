"""The application that commands register with, and what they share: consoles, panels, exit codes."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from flashcheck import __version__

if TYPE_CHECKING:
    from rich.console import Console

USAGE = 2
PLAN, REPRODUCE, DEVICES, OUTPUT = "Plan", "Reproduce", "Devices", "Output"

app = typer.Typer(
    name="flashcheck",
    help="Certifies flash-attention kernels against proved elementwise error bounds.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"flashcheck {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    del version


NoColor = Annotated[bool, typer.Option("--no-color", help="Plain text.", rich_help_panel=OUTPUT)]


def consoles(no_color: bool) -> tuple[Console, Console]:
    """stdout for results, stderr for progress."""
    from rich.console import Console

    plain = no_color or bool(os.environ.get("NO_COLOR"))
    wide = None if sys.stdout.isatty() else 160  # a pipe has no width; tables must not be cut
    return Console(no_color=plain, width=wide), Console(stderr=True, no_color=plain)
