"""``flashcheck compare``: its options."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flashcheck.cli.app import OUTPUT, NoColor, app, consoles


@app.command()
def compare(
    old: Annotated[Path, typer.Argument(metavar="OLD", help="A certificate's file.")],
    new: Annotated[Path, typer.Argument(metavar="NEW", help="Another, of the same kernel.")],
    fail_if: Annotated[
        list[str] | None,
        typer.Option(
            metavar="WHAT:N%",
            help="Largest accepted growth: margin:10%, rms:5% (the defaults). Repeat for both.",
            rich_help_panel=OUTPUT,
        ),
    ] = None,
    markdown: Annotated[
        bool, typer.Option("--markdown", help="For a pull request's comment.", rich_help_panel=OUTPUT)
    ] = False,
    no_color: NoColor = False,
) -> None:
    """Report precision regressions between two certificates; speed is left out.

    Exit code: 0 none; 1 a margin or an rms error grew past its limit, or something is no longer judged.

    Example: flashcheck compare main.json branch.json --fail-if margin:20%
    """
    from flashcheck.commands.compare import run_compare

    raise typer.Exit(run_compare(old, new, fail_if or (), markdown, consoles(no_color)[0]))
