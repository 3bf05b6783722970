"""``flashcheck list``: its options."""

from __future__ import annotations

from typing import Annotated

import typer

from flashcheck.cli.app import NoColor, app, consoles


@app.command("list")
def list_(
    what: Annotated[
        str | None,
        typer.Argument(metavar="[WHAT]", help="kernels, checks, coverage, values or formats."),
    ] = None,
    no_color: NoColor = False,
) -> None:
    """Show known kernels, checks, fault classes and their checks, value families and formats."""
    from flashcheck.devices import interpret_without_gpu
    from flashcheck.listing import run_list

    interpret_without_gpu()
    raise typer.Exit(run_list(what, consoles(no_color)[0]))
