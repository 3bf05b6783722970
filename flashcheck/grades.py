"""The smallest loss of precision that is caught, by place and dtype."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from flashcheck.certify import certify
from flashcheck.checks import CHECKS
from flashcheck.formats import Format, format_named
from flashcheck.mutants.losses import LOSSES, Loss, lossy_kernel
from flashcheck.plan import Plan, make_plan

DTYPES = ("fp16", "bf16", "fp32")


@dataclass(frozen=True, slots=True)
class Grade:
    """The smallest loss of one place that the checks of accuracy reject.

    Attributes:
        loss: its name; what: in words; dtype: of q, k, v.
        ulps: sizes are errors in ulps of fp32, not significand bits that are kept.
        smallest: the size, None where even the largest passes.
        check: that rejected it first; cases: problems until then.
        passes: the next smaller loss, which passed; None where no smaller one was there to try.
    """

    loss: str
    what: str
    dtype: str
    ulps: bool
    smallest: int | None
    check: str
    cases: int
    passes: int | None


def grade_all(
    level: str = "quick",
    on_grade: Callable[[Grade], None] = lambda _: None,
    dtypes: tuple[str, ...] = DTYPES,
    losses: tuple[Loss, ...] = tuple(LOSSES.values()),
) -> list[Grade]:
    """A grade per loss and dtype, each by bisection over its sizes, on the plan's problems of that dtype.

    Only checks that need no further run of the kernel are made: they are the ones that measure.
    """
    grades = []
    for dtype in dtypes:
        plan = accuracy_plan(dtype, level)
        for loss in losses:
            grades.append(grade(loss, format_named(dtype), plan))
            on_grade(grades[-1])
    return grades


def accuracy_plan(dtype: str, level: str) -> Plan:
    """The plan's problems of one dtype, with the checks that cost no further run."""
    some = next(iter(LOSSES.values()))
    plan = make_plan(lossy_kernel(some, some.sizes(format_named(dtype))[0]), level, (dtype,))
    cases = (replace(c, checks=tuple(n for n in c.checks if not CHECKS[n].reruns)) for c in plan.cases)
    return replace(plan, cases=tuple(cases))


def grade(loss: Loss, fmt: Format, plan: Plan) -> Grade:
    """Bisects for the smallest size that is caught; the next smaller one was tried and passed."""
    sizes = loss.sizes(fmt)
    found: dict[int, tuple[str, int]] = {}

    def caught(index: int) -> bool:
        outcome = certify(lossy_kernel(loss, sizes[index]), plan, stop_at_first=True)
        if outcome.findings:
            found[index] = outcome.findings[0].record.check, outcome.judged
        return index in found

    low, high = -1, len(sizes)  # low is caught, high passes
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if caught(middle) else (low, middle)
    check, cases = found.get(low, ("", 0))
    smallest = None if low < 0 else sizes[low]
    passes = sizes[high] if high < len(sizes) else None
    return Grade(loss.name, loss.what, fmt.name, loss.ulps, smallest, check, cases, passes)
