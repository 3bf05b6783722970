"""``flashcheck certify``: its options."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flashcheck.cli.app import DEVICES, OUTPUT, PLAN, REPRODUCE, NoColor, app, consoles


@app.command()
def certify(
    kernels: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[KERNEL]...",
            help="package.module:attribute, path/file.py:attribute or a built-in name; "
            "default: kernels in the table tool.flashcheck of ./pyproject.toml.",
        ),
    ] = None,
    level: Annotated[
        str | None, typer.Option(help="quick (default), standard or thorough.", rich_help_panel=PLAN)
    ] = None,
    dtype: Annotated[
        list[str] | None, typer.Option(help="Only this dtype; repeat for more.", rich_help_panel=PLAN)
    ] = None,
    max_cases: Annotated[
        int | None,
        typer.Option(min=1, help="Problems per dtype, in place of the level's.", rich_help_panel=PLAN),
    ] = None,
    max_time: Annotated[
        str | None, typer.Option(help="Stop after this long: 90s, 10m.", rich_help_panel=PLAN)
    ] = None,
    seed: Annotated[
        int | None, typer.Option(help="Of all random draws; fixed by default.", rich_help_panel=REPRODUCE)
    ] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda[:N].", rich_help_panel=DEVICES)] = None,
    compile_ahead: Annotated[
        int | None,
        typer.Option(
            min=0,
            metavar="N",
            help="Processes that compile for problems to come; default: all cores but two on a GPU, "
            "none elsewhere.",
            rich_help_panel=DEVICES,
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="The certificate's file.", dir_okay=False, rich_help_panel=OUTPUT)
    ] = None,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Margins per value family.", rich_help_panel=OUTPUT)
    ] = False,
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="Only the last lines.", rich_help_panel=OUTPUT)
    ] = False,
    no_color: NoColor = False,
) -> None:
    """Judge kernels and write a certificate.

    Exit code: 0 certified, 1 rejected, 2 wrong usage, 3 incomplete, 4 the judge failed, 130 interrupted.
    """
    from flashcheck.commands.certify import CertifyRequest, run_certify

    request = CertifyRequest(
        kernels=tuple(kernels or ()),
        level=level,
        dtypes=tuple(dtype or ()),
        max_cases=max_cases,
        max_time=max_time,
        seed=seed,
        out=out,
        device=device,
        compile_ahead=compile_ahead,
        verbose=verbose,
        quiet=quiet,
    )
    raise typer.Exit(run_certify(request, *consoles(no_color)))
