"""The audit: proves that the checks can fail. Every seeded fault must be caught, the control must pass."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from flashcheck.certify import one_thread
from flashcheck.checks import CHECKS, Judged
from flashcheck.checks.diagnose import diagnose
from flashcheck.kernel import Kernel
from flashcheck.mutants import MUTANTS, Mutant, control
from flashcheck.problem import Problem

CHEAP = 0
"""Further kernel runs that a check may cost to be made on every mutant."""


@dataclass(frozen=True, slots=True)
class AuditRow:
    """What became of one mutant.

    Attributes:
        mutant: its name; fault: in words.
        expected: the check that must catch it; caught: the checks that did.
        likely: the first diagnosis, or "".
        false_alarms: checks that rejected the control on the same problems.
    """

    mutant: str
    fault: str
    expected: str
    caught: tuple[str, ...]
    likely: str
    false_alarms: tuple[str, ...]

    @property
    def good(self) -> bool:
        """Caught by the check that it is for, and the control passed."""
        return self.expected in self.caught and not self.false_alarms


def audit(
    mutants: Iterable[Mutant] | None = None,
    on_row: Callable[[AuditRow], None] = lambda _: None,
    every_check: bool = False,
) -> list[AuditRow]:
    """Runs every mutant (or those given) on the problems that expose it, and the control on the same ones.

    Each meets the check that must catch it and all that need no further run of the kernel;
    ``every_check``: all checks, which takes ten times as long.
    """
    rows = []
    with one_thread():
        for mutant in MUTANTS.values() if mutants is None else mutants:
            rows.append(_audit(mutant, every_check))
            on_row(rows[-1])
    return rows


def _audit(mutant: Mutant, every_check: bool) -> AuditRow:
    problems = mutant.expose()
    names = [n for n, c in CHECKS.items() if every_check or n == mutant.caught_by or c.reruns <= CHEAP]
    judged = _judge(mutant.make(), problems)
    caught = _failing(judged, names)
    likely = diagnose(judged) if judged.answers() else ()
    return AuditRow(
        mutant=mutant.name,
        fault=mutant.fault,
        expected=mutant.caught_by,
        caught=caught,
        likely=likely[0] if likely else "",
        false_alarms=_failing(_judge(control(mutant.splits, mutant.tiling_known), problems), names),
    )


def _judge(kernel: Kernel, problems: tuple[Problem, ...]) -> Judged:
    """The last problem, after the kernel has seen the ones before it."""
    for earlier in problems[:-1]:
        kernel.forward(earlier)
    return Judged(kernel, problems[-1])


def _failing(judged: Judged, names: list[str]) -> tuple[str, ...]:
    return tuple(name for name in names if CHECKS[name].on(judged).failed)
