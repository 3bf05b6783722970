"""A report under sixty lines for a pull request's comment."""

from __future__ import annotations

from collections.abc import Sequence

from flashcheck.report.certificate import Certificate
from flashcheck.report.html import side_by_side
from flashcheck.report.repro import again_command
from flashcheck.report.terminal import MEANING, number, place, ratio

MOST_LINES = 59
MOST_ROWS = 21
MOST_FINDINGS = 4
_SIGN = {"certified": "✅", "rejected": "❌", "incomplete": "⚠️", "judge failed": "⚠️"}


def markdown_report(certificates: Sequence[tuple[str, Certificate]]) -> str:
    """Verdicts first, then the table (side by side for several), findings, what was not judged."""
    lines = [_headline(c) for _, c in certificates[:8]]
    if len(certificates) > 8:
        lines.append(f"- and {len(certificates) - 8} more certificates")
    lines.append("")
    table = _table(*certificates[0]) if len(certificates) == 1 else _columns(certificates)
    lines += table[: MOST_ROWS + 2]
    if len(table) > MOST_ROWS + 2:
        lines.append(f"\n{len(table) - MOST_ROWS - 2} more rows in the full report.")
    findings = [(path, c, f) for path, c in certificates for f in c.findings]
    for path, c, f in findings[:MOST_FINDINGS]:
        lines += ["", f"**{f.check}** {f.dtype}, {c.kernel.name}: {_cell(f.message)}"]
        lines += [f"Likely: {_cell(guess)}" for guess in f.likely[:1]]
        lines.append(f"`{again_command(path, c, f)}`")
    if len(findings) > MOST_FINDINGS:
        lines += ["", f"{len(findings) - MOST_FINDINGS} more findings in the full report."]
    return "\n".join([*lines, *_gaps(certificates)][:MOST_LINES]) + "\n"


def _gaps(certificates: Sequence[tuple[str, Certificate]]) -> list[str]:
    gaps = []
    for _, c in certificates[:3]:
        for dtype, labels in list(c.coverage.missing.items())[:3]:
            gaps.append(f"- {c.kernel.name}, {dtype}: not judged: {', '.join(labels)}")
        if c.coverage.undeclared:
            words = ", ".join(c.coverage.undeclared)
            gaps.append(f"- {c.kernel.name}: not declared, so never judged: {words}")
    return ["", *gaps] if gaps else []


def _headline(c: Certificate) -> str:
    sign = _SIGN[c.verdict]
    run = f"{c.run.judged:,} problems, level {c.run.level}, {c.machine.device}"
    return f"- {sign} **{c.verdict.upper()}** {c.kernel.name} ({run}): {MEANING[c.verdict]}"


def _table(path: str, c: Certificate) -> list[str]:
    del path
    rows = [
        "| dtype | tensor | problems | worst margin | rms ratio | special | verdict | worst element |",
        "|---|---|--:|--:|--:|--:|---|---|",
    ]
    for t in c.tensors:
        cells = [t.dtype, t.tensor, f"{t.cases:,}", number(t.worst_margin), ratio(t)]
        cells += [f"{t.special_passed}/{t.special_total}", t.verdict, place(t, c.problems)]
        rows.append("| " + " | ".join(map(_cell, cells)) + " |")
    return rows


def _columns(certificates: Sequence[tuple[str, Certificate]]) -> list[str]:
    names = [_cell(f"{c.kernel.name}, {c.machine.device}") for _, c in certificates]
    rows = ["| dtype | tensor | " + " | ".join(names) + " |", "|---|---|" + "--:|" * len(names)]
    for row in side_by_side(certificates):
        cells = [row["dtype"], row["tensor"], *(cell["text"] for cell in row["cells"])]
        rows.append("| " + " | ".join(map(_cell, cells)) + " |")
    return rows


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("*", "\\*").replace("\n", " ")
