"""The audit: proves that the checks can fail. Every seeded fault must be caught, the control must pass.

The control meets the same checks on the same problems and differs in the faulty line alone: where it passes
and the mutant fails, that line ran and made the difference.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from flashcheck.certify import one_thread
from flashcheck.checks import CHECKS, Judged
from flashcheck.checks.bits import first_difference
from flashcheck.checks.diagnose import diagnose
from flashcheck.kernel import Kernel
from flashcheck.loading import load
from flashcheck.mutants import MUTANTS, Mutant, control
from flashcheck.mutants.patched import patched_kernel
from flashcheck.mutants.patches import Patch
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


@dataclass(frozen=True, slots=True)
class EquivalentRow:
    """A change that is proved to change nothing: neither caught nor missed.

    Attributes:
        patch: its name; change: in words; proof: why no input tells it from the clean source.
        difference: where its bits part from the clean kernel's after all, or "".
    """

    patch: str
    change: str
    proof: str
    difference: str


def audit_patches(
    patches: Iterable[Patch],
    on_row: Callable[[AuditRow | EquivalentRow], None] = lambda _: None,
    every_check: bool = False,
) -> tuple[list[AuditRow], list[EquivalentRow]]:
    """The same for faults in the source of a real kernel, and the bits of the equivalent patches.

    Raises ArgumentError for a patch that does not apply.
    """
    faults: list[AuditRow] = []
    equivalents: list[EquivalentRow] = []
    with one_thread():
        for patch in patches:
            problems = tuple(spec.build() for spec in patch.specs)
            clean = load(patch.kernel)
            with patched_kernel(patch) as kernel:
                if patch.equivalent:
                    different = next(filter(None, (_difference(kernel, clean, p) for p in problems)), "")
                    row = EquivalentRow(patch.name, patch.fault, patch.equivalent, different)
                    equivalents.append(row)
                    on_row(row)
                    continue
                told = (patch.name, patch.fault, patch.caught_by)
                faults.append(_row(told, problems, kernel, clean, every_check))
            on_row(faults[-1])
    return faults, equivalents


def _difference(kernel: Kernel, clean: Kernel, problem: Problem) -> str:
    """The first bits in which forward or backward part, or ""."""
    one, other = Judged(kernel, problem), Judged(clean, problem)
    found = first_difference(one.result, other.result) or ""
    if clean.backward is None or found:
        return found
    return next(
        (f"{n} differs" for n, x in one.gradients.items() if not torch.equal(x, other.gradients[n])), ""
    )


def _audit(mutant: Mutant, every_check: bool) -> AuditRow:
    told = (mutant.name, mutant.fault, mutant.caught_by)
    honest = control(mutant.splits, mutant.tiling_known)
    return _row(told, mutant.expose(), mutant.make(), honest, every_check)


def _row(
    told: tuple[str, str, str],
    problems: tuple[Problem, ...],
    kernel: Kernel,
    honest: Kernel,
    every_check: bool,
) -> AuditRow:
    """Judges both; ``told``: name, fault, and the check that must catch it."""
    name, fault, expected = told
    names = [n for n, c in CHECKS.items() if every_check or n == expected or c.reruns <= CHEAP]
    judged = _judge(kernel, problems)
    caught = _failing(judged, names)
    likely = diagnose(judged) if judged.answers() else ()
    return AuditRow(
        mutant=name,
        fault=fault,
        expected=expected,
        caught=caught,
        likely=likely[0] if likely else "",
        false_alarms=_failing(_judge(honest, problems), names),
    )


def _judge(kernel: Kernel, problems: tuple[Problem, ...]) -> Judged:
    """The last problem, after the kernel has seen the ones before it."""
    for earlier in problems[:-1]:
        kernel.forward(earlier)
    return Judged(kernel, problems[-1])


def _failing(judged: Judged, names: list[str]) -> tuple[str, ...]:
    return tuple(name for name in names if CHECKS[name].on(judged).failed)
