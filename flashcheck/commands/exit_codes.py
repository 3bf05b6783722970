"""Exit codes of every command that gives a verdict."""

from __future__ import annotations

from flashcheck.certify import Outcome

EXIT_CODES = {"certified": 0, "rejected": 1, "incomplete": 3, "judge failed": 4}
INTERRUPTED = 130
SEVERITY = (0, 3, 1, 4, INTERRUPTED)


def exit_code(outcome: Outcome) -> int:
    """0 certified, 1 rejected, 3 incomplete, 4 judge failed, 130 interrupted."""
    return INTERRUPTED if outcome.interrupted else EXIT_CODES[outcome.verdict.value]
