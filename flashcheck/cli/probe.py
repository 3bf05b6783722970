"""``flashcheck probe``: its options."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flashcheck.cli.app import DEVICES, OUTPUT, NoColor, app, consoles


@app.command()
def probe(
    device: Annotated[
        str | None,
        typer.Option(help="cpu or cuda[:N]; default: the GPU where there is one.", rich_help_panel=DEVICES),
    ] = None,
    kernel: Annotated[
        str | None,
        typer.Option(
            metavar="KERNEL",
            help="Load this kernel first, with what it changes in the process, and compare with its machine.",
            rich_help_panel=DEVICES,
        ),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="A sample of arguments, also on a GPU.")] = False,
    json: Annotated[
        Path | None,
        typer.Option("--json", help="Write the report here.", dir_okay=False, rich_help_panel=OUTPUT),
    ] = None,
    no_color: NoColor = False,
) -> None:
    """Measure how the device adds, casts and exponentiates.

    Exit code: 0, 2 wrong usage, 4 the machine model that verdicts use here is contradicted, 130 interrupted.
    """
    from flashcheck.commands.probe import ProbeRequest, run_probe

    request = ProbeRequest(device=device, json=json, quick=quick, kernel=kernel)
    raise typer.Exit(run_probe(request, *consoles(no_color)))
