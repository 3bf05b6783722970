"""``flashcheck init``: its options."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flashcheck.cli.app import NoColor, app, consoles


@app.command()
def init(
    folder: Annotated[Path, typer.Argument(metavar="[DIR]", help="The repository; default: here.")] = Path(),
    kernel: Annotated[
        str | None, typer.Option(help="package.module:attribute or path/file.py:attribute.")
    ] = None,
    action: Annotated[
        str, typer.Option(help="OWNER/REPO@VERSION whose action.yml the workflow uses.")
    ] = "flashcheck/flashcheck@v0.1.0",
    no_color: NoColor = False,
) -> None:
    """Write a starter into a repository: a test file, the pyproject table, a workflow.

    What is there stays as it is.

    Example: flashcheck init --kernel mine.attention:flash
    """
    from flashcheck.commands.init import run_init

    raise typer.Exit(run_init(folder, kernel, action, consoles(no_color)[0]))
