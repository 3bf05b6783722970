"""``flashcheck verify``: its options."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flashcheck.cli.app import DEVICES, REPRODUCE, NoColor, app, consoles


@app.command()
def verify(
    certificate: Annotated[Path, typer.Argument(metavar="CERT", help="A certificate's file.")],
    kernel: Annotated[
        str | None,
        typer.Option(help="Judge this kernel in place of the recorded one.", rich_help_panel=REPRODUCE),
    ] = None,
    problem: Annotated[
        str | None,
        typer.Option(help="Only the problem of this id, under every check.", rich_help_panel=REPRODUCE),
    ] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda[:N].", rich_help_panel=DEVICES)] = None,
    no_color: NoColor = False,
) -> None:
    """Run a certificate's worst cases and findings again.

    Exit code: 0 every recorded number came out again, bit for bit; 1 not; 3 it is another machine, version
    or source, and every element is inside its bound.

    Example: flashcheck verify golden/certificates/torch.sdpa.flash.cpu.json
    """
    from flashcheck.commands.verify import run_verify

    raise typer.Exit(run_verify(certificate, kernel, device, problem, consoles(no_color)[0]))
