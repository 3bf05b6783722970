"""``flashcheck fuzz``: its options."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flashcheck.cli.app import DEVICES, OUTPUT, PLAN, REPRODUCE, NoColor, app, consoles


@app.command()
def fuzz(
    kernel: Annotated[
        str,
        typer.Argument(
            metavar="KERNEL", help="package.module:attribute, path/file.py:attribute or a built-in name."
        ),
    ],
    max_time: Annotated[
        str | None,
        typer.Option(help="Hunt this long: 90s, 10m; without a limit: until Ctrl-C.", rich_help_panel=PLAN),
    ] = None,
    max_cases: Annotated[
        int | None, typer.Option(min=1, help="Stop after so many problems.", rich_help_panel=PLAN)
    ] = None,
    dtype: Annotated[
        list[str] | None, typer.Option(help="Only this dtype; repeat for more.", rich_help_panel=PLAN)
    ] = None,
    against: Annotated[
        str,
        typer.Option(
            metavar="KERNEL",
            help="Also say where KERNEL's errors are smaller than this one's.",
            rich_help_panel=PLAN,
        ),
    ] = "",
    timeout: Annotated[
        float,
        typer.Option(
            min=1.0, help="Seconds after which a call of the kernel counts as hanging.", rich_help_panel=PLAN
        ),
    ] = 60.0,
    seed: Annotated[
        int | None,
        typer.Option(help="Of all random draws; random and printed by default.", rich_help_panel=REPRODUCE),
    ] = None,
    db: Annotated[
        Path | None,
        typer.Option(
            help="The campaign's folder; default: .flashcheck/fuzz/KERNEL.",
            file_okay=False,
            rich_help_panel=REPRODUCE,
        ),
    ] = None,
    resume: Annotated[
        bool,
        typer.Option("--resume", help="Go on with the campaign in that folder.", rich_help_panel=REPRODUCE),
    ] = False,
    workers: Annotated[
        int | None,
        typer.Option(
            "--workers",
            "-n",
            min=1,
            help="Processes; default: one a core, on a GPU up to 12 that share it.",
            rich_help_panel=DEVICES,
        ),
    ] = None,
    ray: Annotated[
        str | None,
        typer.Option(
            metavar="ADDRESS",
            help="Run on a Ray cluster: its address, auto for the running one, local for this machine.",
            rich_help_panel=DEVICES,
        ),
    ] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda[:N].", rich_help_panel=DEVICES)] = None,
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="No progress.", rich_help_panel=OUTPUT)
    ] = False,
    no_color: NoColor = False,
) -> None:
    """Hunt for failures, shrink them, leave repros that stand alone.

    Exit code: 0 nothing found, 1 something found, 2 wrong usage, 3 no case was judged, 4 the judge failed,
    130 interrupted.
    """
    from flashcheck.commands.fuzz import FuzzRequest, run_fuzz

    request = FuzzRequest(
        kernel=kernel,
        max_time=max_time,
        max_cases=max_cases,
        seed=seed,
        db=db,
        resume=resume,
        workers=workers,
        dtypes=tuple(dtype or ()),
        device=device,
        timeout=timeout,
        against=against,
        ray=ray,
        quiet=quiet,
    )
    raise typer.Exit(run_fuzz(request, *consoles(no_color)))
