"""``flashcheck report``: its options."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flashcheck.cli.app import OUTPUT, NoColor, app, consoles


@app.command()
def report(
    certificates: Annotated[
        list[Path], typer.Argument(metavar="CERT...", help="Certificates' files; several: side by side.")
    ],
    html: Annotated[
        Path | None,
        typer.Option(help="Write one self-contained page.", dir_okay=False, rich_help_panel=OUTPUT),
    ] = None,
    markdown: Annotated[
        bool,
        typer.Option("--markdown", help="Print under 60 lines for a comment.", rich_help_panel=OUTPUT),
    ] = False,
    badge: Annotated[
        Path | None,
        typer.Option(
            help="Write a badge: .svg, or .json for an endpoint badge.",
            dir_okay=False,
            rich_help_panel=OUTPUT,
        ),
    ] = None,
    no_color: NoColor = False,
) -> None:
    """Show certificates: on the terminal, as a page, as Markdown, as a badge.

    Example: flashcheck report old.json new.json --html report.html
    """
    from flashcheck.commands.report import run_report

    raise typer.Exit(run_report(certificates, html, markdown, badge, *consoles(no_color)))
