"""No class of public faults is without an answer, and the table says only what is so."""

from __future__ import annotations

import re

import pytest

from flashcheck.checks import CHECKS
from flashcheck.checks.fault_classes import FAULT_CLASSES
from flashcheck.mutants import MUTANTS
from tests.checks.faults_table import FILE, line

ROWS = dict(re.findall(r"^\| ([A-Z]+) \| (.*) \|$", FILE.read_text(encoding="utf-8"), re.M))


@pytest.mark.parametrize("letter", FAULT_CLASSES)
def test_every_class_has_a_check_or_says_who_answers(letter: str) -> None:
    checks = [c.name for c in CHECKS.values() if letter in c.faults]
    assert bool(checks) != bool(FAULT_CLASSES[letter].elsewhere), checks


def test_the_classes_without_a_check_are_these() -> None:
    """Dropout is outside the contract, and checkers are what the audit judges: a third one needs a reason."""
    assert {letter for letter, known in FAULT_CLASSES.items() if known.elsewhere} == {"M", "AA"}


@pytest.mark.parametrize("letter", FAULT_CLASSES)
def test_the_table_has_every_class_and_claims_no_more_than_there_is(letter: str) -> None:
    """A new check need not stand there yet; what stands there must be so."""
    wrong = "write it anew: python -m tests.checks.faults_table"
    title, seeded, checks = ROWS[letter].split(" | ", 2)
    there = line(letter)
    assert title == FAULT_CLASSES[letter].title, wrong
    assert (0 if seeded == "-" else int(seeded)) <= sum(m.letter == letter for m in MUTANTS.values()), wrong
    claimed = set(re.findall(r"`[a-z_.]+`", checks)) if not checks.startswith("none: ") else set()
    assert claimed <= set(re.findall(r"`[a-z_.]+`", there)), wrong
    assert claimed or FAULT_CLASSES[letter].elsewhere in checks, wrong
    assert claimed or FAULT_CLASSES[letter].elsewhere, wrong
