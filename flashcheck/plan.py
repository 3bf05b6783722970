"""Which problems a kernel is judged on, and by which checks: declared capabilities and a level in, cases out.

A plan is deterministic in (capabilities, level, dtypes, seed). It opens with one case for everything
that the declaration obliges (``coverage.required``) and goes on with random draws.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from flashcheck.checks import CHECKS
from flashcheck.errors import ArgumentError, UnknownNameError
from flashcheck.inputs.coverage import required
from flashcheck.inputs.problems import Wishes, draw_spec, families_for
from flashcheck.inputs.spec import ProblemSpec
from flashcheck.inputs.values import FAMILIES
from flashcheck.kernel import Capabilities, Kernel

LEVELS: dict[str, int] = {"quick": 1, "standard": 64}
"""Problems per dtype. No level shrinks below the cases that the declaration obliges: all that quick has."""

DEFAULT_LEVEL = "standard"
DEFAULT_SEED = 20260  # fixed: two runs of one version judge the same problems

EVERY = {
    "special.nonfinite": (8, 0),
    "isolation.buffers": (8, 1),
    "bitwise.repeat": (4, 2),
    "backward.bound": (2, 0),
    "backward.algorithm": (2, 0),
    "backward.own_forward": (4, 2),
    "backward.end_to_end": (4, 2),
}
"""Checks that run the kernel again are made on every n-th case, each with an offset of its own."""

OVER_GROUPS = ("forward.rms", "backward.rms", "forward.score_scale", "forward.cast_of_p")
"""Checks that certify makes over all cases of a dtype, not case by case."""

_ATTEMPTS = 200


@dataclass(frozen=True, slots=True)
class Case:
    """One problem to judge.

    Attributes:
        spec: the problem.
        checks: names of the checks to make.
        reason: what of the declaration it is there for; "" for a random draw.
    """

    spec: ProblemSpec
    checks: tuple[str, ...]
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Plan:
    """All cases, dtype after dtype.

    Attributes:
        cases: in the order in which they run.
        unplanned: dtype -> declared features for which no legal problem was found.
    """

    level: str
    seed: int
    dtypes: tuple[str, ...]
    cases: tuple[Case, ...]
    unplanned: dict[str, tuple[str, ...]]


def make_plan(
    kernel: Kernel,
    level: str = DEFAULT_LEVEL,
    dtypes: tuple[str, ...] = (),
    max_cases: int | None = None,
    seed: int = DEFAULT_SEED,
) -> Plan:
    """The plan for a kernel.

    Args:
        level: ``quick`` or ``standard``.
        dtypes: narrows the declared ones; empty: all.
        max_cases: problems per dtype in place of the level's number.
        seed: of all random draws.

    Raises:
        UnknownNameError: for a level that does not exist or a dtype that the kernel does not declare.
    """
    if level not in LEVELS:
        raise UnknownNameError("level", level, LEVELS)
    if max_cases is not None and max_cases < 1:
        raise ArgumentError("max_cases", max_cases, "a positive integer")
    capabilities = kernel.capabilities
    for dtype in dtypes:
        if dtype not in capabilities.dtypes:
            raise UnknownNameError("dtype", dtype, capabilities.dtypes)
    chosen = dtypes or capabilities.dtypes
    cases: list[Case] = []
    unplanned: dict[str, tuple[str, ...]] = {}
    for dtype in chosen:
        planned, missing = _cases(capabilities, dtype, LEVELS[level], max_cases, seed)
        cases += planned
        if missing:
            unplanned[dtype] = missing
    return Plan(level, seed, chosen, tuple(cases), unplanned)


def _cases(
    capabilities: Capabilities, dtype: str, usual: int, max_cases: int | None, seed: int
) -> tuple[list[Case], tuple[str, ...]]:
    rng = random.Random(f"{seed}/{dtype}")
    cases: list[Case] = []
    missing: list[str] = []
    families = [name for name in families_for(capabilities) if "overflows" not in FAMILIES[name].properties]
    unused = list(families)  # each obliged feature brings one family along, so that both are covered at once
    for label, wishes in required(capabilities).items():
        if label.startswith("values ") and wishes.family in families and wishes.family not in unused:
            continue
        chosen = wishes if wishes.family is not None else replace(wishes, family=_next(unused, families, rng))
        spec = _legal(rng, capabilities, dtype, chosen)
        if spec is None:
            missing.append(label)
            continue
        if spec.family in unused:
            unused.remove(spec.family)
        cases.append(Case(spec, _checks(len(cases)), label))
    total = max(usual, len(cases)) if max_cases is None else max_cases
    while len(cases) < total:
        spec = _legal(rng, capabilities, dtype, Wishes(family=families[len(cases) % len(families)]))
        if spec is None:
            break
        cases.append(Case(spec, _checks(len(cases))))
    return cases[:total], tuple(missing)


def _next(unused: list[str], families: list[str], rng: random.Random) -> str:
    return unused[0] if unused else rng.choice(families)


def _legal(rng: random.Random, capabilities: Capabilities, dtype: str, wishes: Wishes) -> ProblemSpec | None:
    """A drawn spec that the declaration does not exclude; None after many attempts."""
    for _ in range(_ATTEMPTS):
        spec = draw_spec(rng, capabilities, dtype, rng.randrange(2**31), wishes)
        if capabilities.refuses(spec.outline()) is None and (
            capabilities.empty_rows or not spec.leaves_rows()
        ):
            return spec
    return None


def _checks(index: int) -> tuple[str, ...]:
    return tuple(
        name
        for name in CHECKS
        if name not in OVER_GROUPS and (name not in EVERY or index % EVERY[name][0] == EVERY[name][1])
    )
