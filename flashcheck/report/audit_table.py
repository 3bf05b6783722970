"""The audit as a table: who caught which fault."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from flashcheck.audit import AuditRow, EquivalentRow
from flashcheck.rivals import MatrixRow, summarised


def print_audit(console: Console, rows: list[AuditRow]) -> None:
    """A line per mutant, then the verdict."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    for heading in ("mutant", "result", "caught by", "fault", "diagnosis"):
        table.add_column(heading)
    for row in rows:
        table.add_row(row.mutant, _result(row), ", ".join(row.caught), row.fault, row.likely)
    console.print(table)
    for row in rows:
        if row.false_alarms:
            text = (
                f"false alarm: {', '.join(row.false_alarms)} rejected the control on {row.mutant}'s problem"
            )
            console.print(Text(text, style="bold red"), soft_wrap=True)
    good = sum(row.good for row in rows)
    alarms = sum(bool(row.false_alarms) for row in rows)
    word = "SOUND" if good == len(rows) else "UNSOUND"
    console.print(
        Text(
            f"{word}  {good} of {len(rows)} mutants caught by the check they are for, {alarms} false alarms",
            style="bold green" if good == len(rows) else "bold red",
        ),
        soft_wrap=True,
    )


def print_equivalents(console: Console, rows: list[EquivalentRow]) -> None:
    """Changes that are proved to change nothing, with the proof, or the bits that refute it."""
    if not rows:
        return
    table = Table(box=None, header_style="bold", pad_edge=False, title="equivalent: they count neither way")
    for heading in ("patch", "bits", "change", "proof"):
        table.add_column(heading)
    for row in rows:
        bits = Text(row.difference, style="bold red") if row.difference else Text("the same", style="green")
        table.add_row(row.patch, bits, row.change, row.proof)
    console.print(table)


def print_rivals(console: Console, rows: list[AuditRow], matrix: list[MatrixRow]) -> None:
    """A line per rule: how many mutants it rejects, and whether it rejects the honest control."""
    total = len(matrix) - 1
    table = Table(box=None, header_style="bold", pad_edge=False, title="the same faults under other rules")
    for heading in ("rule", "formula", "killed, its inputs", "killed, our inputs", "rejects the control"):
        table.add_column(heading)
    for line in summarised(matrix):
        kills = f"{line.own} of {total}", f"{line.ours} of {total}"
        table.add_row(line.rule.name, line.rule.formula, *kills, line.rejects_control)
    killed, alarmed = sum(row.good for row in rows), any(row.false_alarms for row in rows)
    table.add_row("flashcheck", "proved bound", "-", f"{killed} of {total}", "yes" if alarmed else "no")
    console.print(table)


def _result(row: AuditRow) -> Text:
    if row.expected in row.caught:
        return Text("caught", style="green")
    if row.caught:
        return Text(f"caught, not by {row.expected}", style="yellow")
    return Text("SURVIVED", style="bold red")
