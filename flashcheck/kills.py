"""How long a seeded fault lives: `certify`'s own plan, in its order, until the first check fails."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from flashcheck.certify import Progress, certify, one_thread
from flashcheck.checks import CHECKS, Judged
from flashcheck.inputs.spec import ProblemSpec
from flashcheck.kernel import Kernel
from flashcheck.loading import load
from flashcheck.mutants import Mutant, control
from flashcheck.mutants.patched import patched_kernel
from flashcheck.mutants.patches import Patch
from flashcheck.plan import Plan, make_plan


@dataclass(frozen=True, slots=True)
class Kill:
    """What became of one fault under one plan.

    Attributes:
        mutant: its name; letter: its class.
        level: of the plan.
        check: the first check that failed, "" for a survivor.
        spec: the problem on which it failed (plain data of a ``ProblemSpec``); None for a survivor, and where
            a sum over the problems of a dtype failed.
        cases: problems judged until then; planned: in the whole plan.
        seconds: processor time until then, the plan's making included; None where the failure was met in a
            lesser plan and its problem and check lie in this one too (``cases``: at the latest).
        false_alarm: the check also fails on that problem for the honest kernel.
    """

    mutant: str
    letter: str
    level: str
    check: str
    spec: dict[str, Any] | None
    cases: int
    planned: int
    seconds: float | None
    false_alarm: bool

    @property
    def killed(self) -> bool:
        """Rejected, and for the fault's sake."""
        return bool(self.check) and not self.false_alarm

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Kill:
        """A recorded row; keys that are no fields are left out."""
        return cls(**{f.name: data[f.name] for f in fields(cls)})


def hunt_mutants(
    mutants: Iterable[Mutant],
    level: str,
    on_kill: Callable[[Kill], None] = lambda _: None,
    lesser: Mapping[str, Kill] | None = None,
) -> list[Kill]:
    """Hunts every emulated fault.

    ``lesser``: what a lesser plan did, by mutant. Where the failure that it met, problem and check, lies in
    this plan too, a kernel that is a function of its arguments fails there again, and is not run.
    """
    kills = []
    for mutant in mutants:
        honest, kernel = control(mutant.splits, mutant.tiling_known), mutant.make()
        known = (lesser or {}).get(mutant.name)
        kill = None if known is None else implied(known, make_plan(kernel, level))
        kills.append(kill or hunt(mutant.name, mutant.letter, kernel, honest, level))
        on_kill(kills[-1])
    return kills


def hunt_patches(
    patches: Iterable[Patch],
    level: str,
    on_kill: Callable[[Kill], None] = lambda _: None,
    lesser: Mapping[str, Kill] | None = None,
) -> list[Kill]:
    """Hunts every fault in the source of a real kernel; equivalent patches are left out.

    ``lesser``: as for `hunt_mutants`. Raises ArgumentError for a patch that does not apply.
    """
    kills = []
    for patch in patches:
        if patch.equivalent:
            continue
        clean, known = load(patch.kernel), (lesser or {}).get(patch.name)
        kill = None if known is None else implied(known, make_plan(clean, level))
        if kill is None:
            with patched_kernel(patch) as kernel:
                kill = hunt(patch.name, patch.letter, kernel, clean, level)
        kills.append(kill)
        on_kill(kill)
    return kills


def implied(kill: Kill, plan: Plan) -> Kill | None:
    """The failure of a lesser plan in this one; None where it does not lie in it, or nothing was met."""
    if kill.spec is None or not kill.killed:
        return None
    spec = ProblemSpec.from_json(kill.spec)
    at = next((n for n, c in enumerate(plan.cases) if c.spec == spec and kill.check in c.checks), None)
    if at is None:
        return None
    return replace(kill, level=plan.level, cases=at + 1, planned=len(plan.cases), seconds=None)


def hunt(name: str, letter: str, kernel: Kernel, honest: Kernel, level: str) -> Kill:
    """Runs the plan on the faulty kernel until a check fails; then that check on the honest one."""
    started = time.process_time()
    ended: list[tuple[int, float]] = []

    def on_progress(progress: Progress) -> None:
        if progress.failures:
            ended.append((progress.done, time.process_time() - started))

    plan = make_plan(kernel, level)
    outcome = certify(kernel, plan, stop_at_first=True, on_progress=on_progress)
    cases, seconds = ended[0] if ended else (outcome.judged, time.process_time() - started)
    found = outcome.findings[0] if outcome.findings else None
    spec = found.spec if found is not None else None
    check = found.record.check if found is not None else ""
    alarm = False
    if spec is not None:
        with one_thread():
            alarm = CHECKS[check].on(Judged(honest, spec.build())).failed
    data = None if spec is None else spec.to_json()
    return Kill(name, letter, level, check, data, cases, len(plan.cases), round(seconds, 2), alarm)


@dataclass(frozen=True, slots=True)
class Lives:
    """The lives of many faults in numbers.

    Attributes:
        killed, total: how many; timed: of the killed ones, those that were run from the plan's start.
        median_seconds, worst_seconds: of the timed ones; NaN where there are none.
    """

    killed: int
    total: int
    timed: int
    median_seconds: float
    worst_seconds: float


def lives(kills: Sequence[Kill]) -> Lives:
    """Sums up."""
    killed = [k for k in kills if k.killed]
    seconds = [k.seconds for k in killed if k.seconds is not None]
    timed = len(seconds)
    seconds = seconds or [math.nan]
    return Lives(len(killed), len(kills), timed, statistics.median(seconds), max(seconds))
