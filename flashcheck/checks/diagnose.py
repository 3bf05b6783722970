"""Guesses the class of a fault; each guess is proved by a second experiment before it is told."""

from __future__ import annotations

from flashcheck.checks.judged import Judged


def diagnose(judged: Judged) -> tuple[str, ...]:
    return ()
