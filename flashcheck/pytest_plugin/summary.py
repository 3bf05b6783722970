"""A line per kernel and dtype at the end of the run; certificates on request. No torch here."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from flashcheck.report.certificate import Certificate, read, write
from flashcheck.report.merge import merged
from flashcheck.report.terminal import number, ratio

_COLOUR = {"certified": "green", "rejected": "red", "incomplete": "yellow", "judge failed": "purple"}


def results(folder: Path) -> list[Certificate]:
    """Of every group that was judged, by kernel and dtype."""
    parts = [read(path) for path in folder.glob("*.json")]
    return sorted(parts, key=lambda c: (_name(c), c.run.dtypes))


def _name(certificate: Certificate) -> str:
    return certificate.kernel.load_name or certificate.kernel.name


def write_summary(terminal: Any, folder: Path) -> None:
    """Kernel, dtype, verdict, worst margin and its tensor, rms ratio of O, problems."""
    parts = results(folder)
    if not parts:
        return
    terminal.section("flashcheck", sep="-")
    width = max(len(_name(c)) for c in parts)
    for c in parts:
        worst = max(c.tensors, key=lambda t: t.worst_margin, default=None)
        out = next((t for t in c.tensors if t.tensor == "O"), None)
        words = f"{_name(c):{width}}  {' '.join(c.run.dtypes):5}"
        terminal.write(f"{words} ")
        terminal.write(f"{c.verdict.upper():12}", **{_COLOUR[c.verdict]: True})
        margin = (
            "no result" if worst is None else f"worst margin {number(worst.worst_margin)} ({worst.tensor})"
        )
        rms = "" if out is None else f"  rms ratio {ratio(out)}"
        terminal.write_line(f" {margin}{rms}  {c.run.judged} problems, {c.run.seconds:.1f} s")


def write_reports(terminal: Any, folder: Path, target: Path) -> None:
    """One certificate per kernel, its dtypes merged."""
    by_kernel: dict[str, list[Certificate]] = {}
    for part in results(folder):
        by_kernel.setdefault(_name(part), []).append(part)
    for name, parts in by_kernel.items():
        path = target / (re.sub(r"[^A-Za-z0-9_.]+", "-", name) + ".json")
        write(merged(parts), path)
        terminal.write_line(f"certificate  {path}")
