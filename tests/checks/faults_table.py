"""The table of flashcheck/checks/FAULTS.md out of the registries; never typed by hand.

``python -m tests.checks.faults_table`` writes it.
"""

from __future__ import annotations

from pathlib import Path

from flashcheck.checks import CHECKS
from flashcheck.checks.fault_classes import FAULT_CLASSES
from flashcheck.files import write_atomically
from flashcheck.mutants import MUTANTS

FILE = Path(__file__).parents[2] / "flashcheck" / "checks" / "FAULTS.md"
HEAD = """# Which check is for which fault
Classes of faults that users of attention kernels have reported in public, and the checks that are for each.
The table is made by `python -m tests.checks.faults_table`; `flashcheck list coverage` prints it,
`flashcheck list checks` says what each check does.

| | class | seeded faults | checks |
|---|---|--:|---|
"""


def line(letter: str) -> str:
    """The row of one class."""
    known = FAULT_CLASSES[letter]
    checks = ", ".join(f"`{c.name}`" for c in CHECKS.values() if letter in c.faults)
    seeded = sum(m.letter == letter for m in MUTANTS.values())
    return f"| {letter} | {known.title} | {seeded or '-'} | {checks or f'none: {known.elsewhere}'} |"


if __name__ == "__main__":
    write_atomically(FILE, HEAD + "\n".join(map(line, FAULT_CLASSES)) + "\n")
