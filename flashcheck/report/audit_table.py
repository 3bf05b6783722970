"""The audit as a table: who caught which fault."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from flashcheck.audit import AuditRow, EquivalentRow
from flashcheck.grades import Grade
from flashcheck.kills import Kill, lives
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


def print_kills(console: Console, kills: list[Kill], level: str) -> None:
    """How long each fault lived under the level's plan, longest first, and the sum."""
    table = Table(box=None, header_style="bold", pad_edge=False, title=f"the plan of level {level}")
    for heading in ("mutant", "killed by", "problems", "processor time"):
        table.add_column(heading, justify="right" if heading in ("problems", "processor time") else "left")
    for kill in sorted(kills, key=lambda k: (k.killed, -(k.seconds or 0.0))):
        by = Text(kill.check) if kill.killed else Text("SURVIVED", style="bold red")
        table.add_row(kill.mutant, by, f"{kill.cases} of {kill.planned}", _seconds(kill))
    console.print(table)
    sums = lives(kills)
    times = f"median {sums.median_seconds:.1f} s, worst {sums.worst_seconds:.1f} s, {sums.timed} timed"
    told = f"; {times}" if sums.timed else ""
    console.print(f"level {level}: {sums.killed} of {sums.total} killed{told}", soft_wrap=True)


def _seconds(kill: Kill) -> str:
    return "at the latest" if kill.seconds is None else f"{kill.seconds:.1f} s"


def print_grades(console: Console, grades: list[Grade]) -> None:
    """The smallest loss of precision that is caught: a line per place, a column per dtype."""
    table = Table(box=None, header_style="bold", pad_edge=False, title="the smallest loss that is caught")
    dtypes = list(dict.fromkeys(g.dtype for g in grades))
    for heading in ("loss", *dtypes):
        table.add_column(heading)
    for what, cells in graded_lines(grades):
        table.add_row(what, *cells)
    console.print(table)


def graded_lines(grades: Sequence[Grade]) -> list[tuple[str, list[str]]]:
    """Per loss: what it is, and the smallest that is caught for each dtype, in words."""
    lines: dict[str, list[str]] = {}
    for grade in grades:
        lines.setdefault(grade.what, []).append(_smallest(grade))
    return list(lines.items())


def _smallest(grade: Grade) -> str:
    if grade.smallest is None:
        return "none"
    return f"{grade.smallest} {'ulp' if grade.ulps else 'bits'}"


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
