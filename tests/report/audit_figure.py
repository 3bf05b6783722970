"""README's figure of the audit: which share of each class of faults a rule rejects.

``python -m tests.report.audit_figure`` draws golden/audit.svg from golden/audit.json.
"""

from __future__ import annotations

import json
from collections import defaultdict
from html import escape
from pathlib import Path
from typing import Any

from flashcheck.checks.fault_classes import FAULT_CLASSES
from flashcheck.files import write_atomically
from flashcheck.mutants import MUTANTS
from flashcheck.report.heat import colour
from flashcheck.rivals import MatrixRow, summarised

ROOT = Path(__file__).parents[2]
AUDIT = ROOT / "golden" / "audit.json"
FIGURE = ROOT / "golden" / "audit.svg"
OURS = "flashcheck, level quick"

CELL_WIDTH, CELL_HEIGHT = 38, 20
LEFT, TOP, RIGHT, BOTTOM = 440, 172, 90, 34
GAP = 8
"""Between the rules of other suites and ours, and above the line for all classes."""


def killed_by_rule(audit: dict[str, Any]) -> dict[str, set[str]]:
    """Rule -> names of the mutants that it rejects: other suites' on their own inputs, ours by its plan."""
    matrix = [MatrixRow(row["mutant"], tuple(row["own"]), tuple(row["ours"])) for row in audit["rivals"]]
    rules = {line.rule.name: set[str]() for line in summarised(matrix)}
    for row in matrix:
        for rule in row.own:
            rules[rule].add(row.mutant)
    rules[OURS] = {kill["mutant"] for kill in audit["kills"]["mutants, quick"] if kill["killed"]}
    return rules


def drawn(audit: dict[str, Any]) -> str:
    """The figure as SVG text."""
    rules = killed_by_rule(audit)
    judged = {row["mutant"] for row in audit["rivals"]} - {"none"}
    members: dict[str, list[str]] = defaultdict(list)
    for name in judged:
        members[MUTANTS[name].letter].append(name)
    letters = [letter for letter in FAULT_CLASSES if letter in members]
    lines = [(f"{FAULT_CLASSES[x].title} ({len(members[x])})", members[x]) for x in letters]
    lines.append((f"all ({len(judged)})", sorted(judged)))
    parts = [_heading(rule, number, len(rules)) for number, rule in enumerate(rules)]
    for row, (title, names) in enumerate(lines):
        y = TOP + row * CELL_HEIGHT + (GAP if row == len(lines) - 1 else 0)
        weight = ' font-weight="bold"' if row == len(lines) - 1 else ""
        parts.append(f'<text x="{LEFT - 8}" y="{y + 14}" text-anchor="end"{weight}>{escape(title)}</text>')
        for number, killed in enumerate(rules.values()):
            share = len(killed.intersection(names)) / len(names)
            parts.append(_cell(_column(number, len(rules)), y, share))
    width = _column(len(rules) - 1, len(rules)) + CELL_WIDTH + RIGHT
    height = TOP + len(lines) * CELL_HEIGHT + GAP + BOTTOM
    note = "per cent of the seeded faults that a rule rejects; other suites' rules on their own inputs"
    parts.append(f'<text x="{LEFT}" y="{height - 12}">{note}</text>')
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}" font-family="Helvetica, Arial, sans-serif" font-size="12" fill="#222">\n'
        f'<rect width="{width}" height="{height}" fill="#fff"/>\n' + "\n".join(parts) + "\n</svg>\n"
    )


def _column(number: int, count: int) -> int:
    return LEFT + number * CELL_WIDTH + (GAP if number == count - 1 else 0)


def _heading(rule: str, number: int, count: int) -> str:
    x, y = _column(number, count) + CELL_WIDTH // 2 + 4, TOP - 8
    weight = ' font-weight="bold"' if number == count - 1 else ""
    return f'<text transform="translate({x},{y}) rotate(-50)"{weight}>{escape(rule)}</text>'


def _cell(x: int, y: int, share: float) -> str:
    fill = "#{:02x}{:02x}{:02x}".format(*colour(share))
    ink = "#fff" if share > 0.45 else "#222"
    box = f'x="{x + 1}" y="{y + 1}" width="{CELL_WIDTH - 2}" height="{CELL_HEIGHT - 2}"'
    text = f'x="{x + CELL_WIDTH // 2}" y="{y + 14}" text-anchor="middle" font-size="11"'
    edge = ' stroke="#ddd"' if share == 0 else ""
    return f'<rect {box} fill="{fill}"{edge}/><text {text} fill="{ink}">{round(100 * share)}</text>'


if __name__ == "__main__":
    write_atomically(FIGURE, drawn(json.loads(AUDIT.read_text(encoding="utf-8"))))
