"""Compares two certificates and prints what got worse."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from flashcheck.report.certificate import Certificate, read
from flashcheck.report.compare import Comparison, Row, compare, limits_from, percent
from flashcheck.report.terminal import number

HEADINGS = ("dtype", "tensor", "worst margin", "rms ratio", "rms error, same problems", "verdict")


def run_compare(
    old_path: Path, new_path: Path, fail_if: Sequence[str], markdown: bool, stdout: Console
) -> int:
    """0 no regression, 1 a regression."""
    limits = limits_from(fail_if)
    old, new = read(old_path), read(new_path)
    result = compare(old, new, limits)
    if markdown:
        print_plain(stdout, comparison_markdown(old, new, result))
    else:
        _print(old, new, result, stdout)
    return 1 if result.regressed else 0


def print_plain(stdout: Console, text: str) -> None:
    """Text for a program: no colours, no wrapping, no markup."""
    stdout.print(text, markup=False, highlight=False, soft_wrap=True)


def headline(old: Certificate, new: Certificate, result: Comparison) -> str:
    """One line: regressed or not, of which kernel, between which sources."""
    word = "REGRESSED" if result.regressed else "NO REGRESSION"
    sources = f"{old.kernel.source_sha256[:8]} to {new.kernel.source_sha256[:8]}"
    places = (
        "" if old.machine.device == new.machine.device else f", {old.machine.device} to {new.machine.device}"
    )
    return f"{word}  {new.kernel.name}: source {sources}{places}"


def comparison_markdown(old: Certificate, new: Certificate, result: Comparison) -> str:
    """For a pull request's comment."""
    lines = [f"### {headline(old, new, result)}", ""]
    lines += ["| " + " | ".join(HEADINGS) + " |", "|---" * len(HEADINGS) + "|"]
    lines += ["| " + " | ".join(_cells(row)) + " |" for row in result.rows]
    lines += ["", *(f"- {line}" for line in result.worse)] if result.worse else []
    return "\n".join(lines)


def _cells(row: Row) -> list[str]:
    rms = " → ".join("-" if x is None else f"{x:.3f}" for x in row.rms)
    paired = "-" if row.paired is None else f"{percent(row.paired)} ({row.pairs})"
    margins = f"{number(row.margin[0])} → {number(row.margin[1])}"
    return [row.dtype, row.tensor, margins, rms, paired, "; ".join(row.worse) or "fine"]


def _print(old: Certificate, new: Certificate, result: Comparison, stdout: Console) -> None:
    table = Table(box=None, header_style="bold", pad_edge=False)
    for heading in HEADINGS:
        table.add_column(heading)
    for row in result.rows:
        *cells, verdict = _cells(row)
        table.add_row(*cells, Text(verdict, style="bold red" if row.worse else "green"))
    stdout.print(table)
    for line in result.worse:
        stdout.print(Text(line, style="red"), soft_wrap=True)
    style = "bold red" if result.regressed else "bold green"
    stdout.print(Text(headline(old, new, result), style=style), soft_wrap=True)
