"""``flashcheck replay``: its options."""

from __future__ import annotations

from typing import Annotated

import typer

from flashcheck.cli.app import DEVICES, OUTPUT, NoColor, app, consoles


@app.command()
def replay(
    findings: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[ID or FILE]...",
            help="Findings of fuzz: an id, a .json file or a folder; default: all under .flashcheck/fuzz.",
        ),
    ] = None,
    on: Annotated[
        str | None, typer.Option(metavar="KERNEL", help="Judge this kernel in place of the recorded one.")
    ] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda[:N].", rich_help_panel=DEVICES)] = None,
    keep: Annotated[
        bool, typer.Option("--keep", help="Leave the files of what is fixed.", rich_help_panel=OUTPUT)
    ] = False,
    no_color: NoColor = False,
) -> None:
    """Judge recorded failures again; the files of those that are fixed go.

    Exit code: 0 all fixed or none recorded, 1 one fails still, 2 wrong usage, 4 the judge failed.
    """
    from flashcheck.commands.replay import run_replay

    raise typer.Exit(run_replay(tuple(findings or ()), on, device, keep, consoles(no_color)[0]))
