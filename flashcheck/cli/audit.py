"""``flashcheck audit``: its options."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flashcheck.cli.app import OUTPUT, PLAN, NoColor, app, consoles


@app.command()
def audit(
    mutant: Annotated[
        list[str] | None,
        typer.Option(help="Only this mutant or patch; repeat for more.", rich_help_panel=PLAN),
    ] = None,
    rivals: Annotated[
        bool,
        typer.Option(
            "--rivals",
            help="Also: what other suites' rules say of the mutants (minutes).",
            rich_help_panel=PLAN,
        ),
    ] = False,
    level: Annotated[
        str | None,
        typer.Option(
            help="Also: certify's plan of this level on every fault, until a check fails (half an hour). "
            "What --json holds of level quick is not run again where this plan holds it too.",
            rich_help_panel=PLAN,
        ),
    ] = None,
    precision: Annotated[
        bool,
        typer.Option(
            "--precision",
            help="Also: the smallest loss of precision that is caught, by place and dtype (minutes).",
            rich_help_panel=PLAN,
        ),
    ] = False,
    patches: Annotated[
        Path | None,
        typer.Option(
            help="Audit with these source patches of a real kernel instead: a folder of *.toml.",
            file_okay=False,
            exists=True,
            rich_help_panel=PLAN,
        ),
    ] = None,
    json: Annotated[
        Path | None,
        typer.Option(
            help="Write the rows here; parts of the file that were not run are kept.",
            dir_okay=False,
            rich_help_panel=OUTPUT,
        ),
    ] = None,
    no_color: NoColor = False,
) -> None:
    """Run every seeded fault and show who caught it.

    Exit code: 0 all caught, 1 one survived or the control was rejected.
    """
    from flashcheck.commands.audit import run_audit, run_patch_audit

    stdout, stderr = consoles(no_color)
    names = tuple(mutant or ())
    if patches is not None:
        raise typer.Exit(run_patch_audit(patches, names, level, json, stdout, stderr))
    raise typer.Exit(run_audit(names, rivals, level, precision, json, stdout, stderr))
