"""``flashcheck audit``: its options."""

from __future__ import annotations

import typer

from flashcheck.cli.app import NoColor, app, consoles


@app.command()
def audit(no_color: NoColor = False) -> None:
    """Run every seeded fault and show who caught it.

    Exit code: 0 all caught, 1 one survived or the control was rejected.
    """
    from flashcheck.commands.audit import run_audit

    raise typer.Exit(run_audit(consoles(no_color)[0]))
