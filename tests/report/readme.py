"""README's tables, out of the recorded certificates and the registered faults; never typed by hand.

``python -m tests.report.readme`` writes them into README.md.
"""

from __future__ import annotations

import json
import re
import statistics
from collections import Counter
from pathlib import Path

from flashcheck.files import write_atomically
from flashcheck.grades import Grade
from flashcheck.kills import Kill, lives
from flashcheck.report.audit_table import graded_lines
from flashcheck.report.certificate import read
from flashcheck.report.terminal import number
from flashcheck.rivals import MatrixRow, summarised

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
CERTIFICATES = ROOT / "golden" / "certificates"
AUDIT = ROOT / "golden" / "audit.json"


def recorded_table() -> str:
    """A line per recorded certificate: device, dtypes, problems, worst margin forward and backward."""
    lines = [
        "| kernel | device | dtypes | problems | worst margin forward | backward | findings |",
        "|---|---|---|--:|--:|--:|--:|",
    ]
    for path in sorted(CERTIFICATES.glob("*.json")):
        c = read(path)
        sides = [
            max((t.worst_margin for t in c.tensors if t.tensor.startswith("d") is back), default=None)
            for back in (False, True)
        ]
        cells = ["-" if side is None else number(side) for side in sides]
        name = f"[{c.kernel.name}](golden/certificates/{path.name})"
        lines.append(
            f"| {name} | {c.machine.device} | {' '.join(c.run.dtypes)} | {c.run.judged:,} | "
            f"{cells[0]} | {cells[1]} | {len(c.findings)} |"
        )
    return "\n".join(lines)


def faults_table() -> str:
    """How many seeded faults each check must catch."""
    from flashcheck.mutants import MUTANTS

    counts = Counter(m.caught_by for m in MUTANTS.values())
    lines = ["| check | seeded faults that it must catch |", "|---|--:|"]
    lines += [f"| `{check}` | {count} |" for check, count in sorted(counts.items())]
    return "\n".join([*lines, f"| all | {sum(counts.values())} |"])


def rivals_table() -> str:
    """The recorded audit: mutants killed by the acceptance rules of other suites, and by flashcheck."""
    audit = json.loads(AUDIT.read_text(encoding="utf-8"))
    matrix = [MatrixRow(row["mutant"], tuple(row["own"]), tuple(row["ours"])) for row in audit["rivals"]]
    killable = len(matrix) - 1
    lines = [
        "| rule | formula | killed, its own inputs | killed, our inputs | rejects the honest kernel |",
        "|---|---|--:|--:|---|",
    ]
    for line in summarised(matrix):
        formula = line.rule.formula.replace("|", "\\|")
        kills = f"{line.own} of {killable} | {line.ours} of {killable}"
        lines.append(f"| {line.rule.name} | {formula} | {kills} | {line.rejects_control} |")
    good, total = sum(row["good"] for row in audit["mutants"]), len(audit["mutants"])
    alarms = sum(bool(row["false_alarms"]) for row in audit["mutants"])
    lines.append(f"| **flashcheck** | proved bound | - | {good} of {total} | {alarms or 'no'} |")
    return "\n".join(lines)


def patches_text() -> str:
    """What became of the source patches of the Triton kernels."""
    audit = json.loads(AUDIT.read_text(encoding="utf-8"))
    rows, same = audit["patches"], [row for row in audit["equivalents"] if not row["difference"]]
    good, alarms = sum(row["good"] for row in rows), sum(bool(row["false_alarms"]) for row in rows)
    return (
        f"{good} of {len(rows)} patches are rejected by the check that they are for, with {alarms} false "
        f"alarms on the clean kernels; {len(same)} more are proved to change nothing, and change no bit."
    )


def kills_table() -> str:
    """How long faults live under certify's own plan, in its order."""
    audit = json.loads(AUDIT.read_text(encoding="utf-8"))
    lines = [
        "| faults | level | killed | timed | median time | worst time | median problems | worst |",
        "|---|---|--:|--:|--:|--:|--:|--:|",
    ]
    for key, rows in audit["kills"].items():
        kind, level = key.split(", ")
        kills = [Kill.from_json(row) for row in rows]
        sums, cases = lives(kills), sorted(k.cases for k in kills if k.killed)
        timed = f"{sums.timed} | {sums.median_seconds:.1f} s | {sums.worst_seconds:.0f} s"
        times = timed if sums.timed else "- | - | -"
        planned = max(k.planned for k in kills)
        lines.append(
            f"| {KINDS[kind]} | {level} | {sums.killed} of {sums.total} | {times} | "
            f"{statistics.median(cases):g} | {cases[-1]} of {planned} |"
        )
    return "\n".join(lines)


KINDS = {"mutants": "emulated", "patches": "in the Triton kernels, interpreted"}


def precision_table() -> str:
    """The smallest loss of precision that is caught, by place and dtype."""
    audit = json.loads(AUDIT.read_text(encoding="utf-8"))
    grades = [Grade(**row) for row in audit["precision"]]
    dtypes = list(dict.fromkeys(grade.dtype for grade in grades))
    lines = [f"| loss | {' | '.join(dtypes)} |", "|---|" + "--:|" * len(dtypes)]
    lines += [f"| {what} | {' | '.join(cells)} |" for what, cells in graded_lines(grades)]
    return "\n".join(lines)


TABLES = {
    "recorded": recorded_table,
    "faults": faults_table,
    "patches": patches_text,
    "kills": kills_table,
    "precision": precision_table,
    "rivals": rivals_table,
}


def with_tables(text: str) -> str:
    """README's text with every ``<!-- NAME -->`` ... ``<!-- end -->`` block made anew."""
    for name, make in TABLES.items():
        block = f"<!-- {name}: python -m tests.report.readme -->\n{make()}\n<!-- end -->"
        pattern = rf"<!-- {name}: [^\n]*-->\n.*?<!-- end -->"
        assert re.search(pattern, text, re.S), name
        text = re.sub(pattern, lambda _, b=block: b, text, flags=re.S)
    return text


if __name__ == "__main__":
    write_atomically(README, with_tables(README.read_text(encoding="utf-8")))
