"""Score tests over groups of problems: a scale that is off, a cast of P that truncates.

For each direction the amount a = sum(projections) / sum(informations) is estimated. With standard error s
and A, the amount that the declared arithmetic itself may hold, a kernel is rejected where

    |a| - A > 6 s   and   |a| > the smallest amount that matters.

A kernel that follows its declaration does so with probability 2 Q(6) = 2e-9 per group where a is normal
with standard error s (a sum over thousands of elements), 5.7e-7 were s 20 % too small. s is the larger of
the model's and the one that the scatter between problems shows. A fault of this kind is in every problem, so
a group is rejected only if it is without its most striking problem too: no single problem whose noise the
model has wrong decides.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from flashcheck.bounds.score_tests import ScoreSums
from flashcheck.checks.judged import Judged
from flashcheck.checks.record import Record, Status
from flashcheck.checks.registry import check, not_applicable

STANDARD_ERRORS = 6.0
FEWEST_ELEMENTS = 1000
"""Elements below which the estimate need not be normal: nothing is judged."""

CHECK_NAMES = {"scale": "forward.score_scale", "cast": "forward.cast_of_p"}
SMALLEST = {"scale": 0.0, "cast": 0.25}
"""Of the cast: a quarter of what truncation does. The grid of 8 bits is coarse enough for rounding to nearest
to be off by 0.001 of it (THEORY.md section 9); no amount of the scale is harmless."""


@dataclass(slots=True)
class ScoreTally:
    """Running sums over the problems of one group, for one direction."""

    projection: float = 0.0
    information: float = 0.0
    variance: float = 0.0
    allowance: float = 0.0
    elements: int = 0
    problems: int = 0
    squares: tuple[float, float, float] = (0.0, 0.0, 0.0)
    striking: tuple[float, float, float, float, int] = (0.0, 0.0, 0.0, 0.0, 0)
    """Projection, information, variance, allowance and elements of the least likely problem."""

    def add(self, sums: ScoreSums) -> None:
        """One problem's sums."""
        if not all(map(math.isfinite, (sums.projection, sums.information, sums.variance, sums.allowance))):
            return
        self.projection += sums.projection
        self.information += sums.information
        self.variance += sums.variance
        self.allowance += sums.allowance
        self.elements += sums.elements
        self.problems += 1
        pp, pi, ii = self.squares
        n, i = sums.projection, sums.information
        self.squares = (pp + n * n, pi + n * i, ii + i * i)
        if _surprise(n, sums.variance, sums.allowance) >= _surprise(*self.striking[:1], *self.striking[2:4]):
            self.striking = (n, i, sums.variance, sums.allowance, sums.elements)

    def without_striking(self) -> ScoreTally:
        """The same sums less the most striking problem."""
        projection, information, variance, allowance, elements = self.striking
        pp, pi, ii = self.squares
        return ScoreTally(
            self.projection - projection,
            self.information - information,
            self.variance - variance,
            self.allowance - allowance,
            self.elements - elements,
            self.problems - 1,
            (pp - projection**2, pi - projection * information, ii - information**2),
        )

    @property
    def amount(self) -> float:
        """How much of the direction the errors hold."""
        return self.projection / self.information if self.information > 0 else 0.0

    @property
    def allowed(self) -> float:
        """How much of it the declared arithmetic may hold."""
        return self.allowance / self.information if self.information > 0 else math.inf

    @property
    def standard_error(self) -> float:
        """Of the amount: the larger of the model's and the one between problems."""
        if self.information <= 0:
            return math.inf
        pp, pi, ii = self.squares
        between = max(pp - 2 * self.amount * pi + self.amount**2 * ii, 0.0) if self.problems > 1 else 0.0
        return math.sqrt(max(self.variance, between)) / self.information

    @property
    def judges(self) -> bool:
        """Enough elements for a verdict."""
        return self.elements >= FEWEST_ELEMENTS and self.information > 0

    def accepted(self, direction: str) -> float:
        """The largest amount that is accepted."""
        return max(self.allowed + STANDARD_ERRORS * self.standard_error, SMALLEST[direction])

    def _is_off(self, direction: str) -> bool:
        return self.judges and abs(self.amount) > self.accepted(direction)

    def verdict(self, direction: str, problem: str) -> Record:
        """The check's verdict on this group."""
        name = CHECK_NAMES[direction]
        if not self.judges:
            few = f"{self.elements} elements whose error is predictable, fewer than {FEWEST_ELEMENTS}"
            return not_applicable(name, few)
        accepted = self.accepted(direction)
        found = (
            f"{self.amount:+.2g} with standard error {self.standard_error:.1g}, accepted up to {accepted:.2g}"
        )
        if direction == "scale":
            line = f"relative error of the scale {found}"
            wrong = f"the scores are scaled by a factor that is wrong by {self.amount:+.2g}: {found}"
        else:
            line = f"bias of the cast of P, of what truncation does: {found}"
            wrong = f"P is not rounded to nearest: its bias is {self.amount:.2g} of a truncation's: {found}"
        alone = self.problems == 1
        if not self._is_off(direction) or not (alone or self.without_striking()._is_off(direction)):
            return Record(name, Status.PASS, line, problem=problem)
        evidence = (
            f"{self.elements:,} elements of {self.problems} problems; the declared arithmetic itself may add "
            f"up to {self.allowed:.2g}",
        )
        return Record(name, Status.FAIL, wrong, evidence=evidence, problem=problem)


def _surprise(projection: float, variance: float, allowance: float) -> float:
    """Standard errors by which a problem's projection leaves what the declaration allows."""
    return max(abs(projection) - allowance, 0.0) / math.sqrt(variance) if variance > 0 else 0.0


def _judge(judged: Judged, direction: str) -> Record:
    name = CHECK_NAMES[direction]
    if not judged.bound.out.prediction_gates:
        return not_applicable(name, "the prediction is not sharp for this output format")
    sums = judged.score_sums.get(direction)
    if sums is None:
        return not_applicable(name, "the problem does not determine it")
    tally = ScoreTally()
    tally.add(sums)
    return tally.verdict(direction, judged.problem.describe())


@check("forward.score_scale", faults="SP", grouped=True)
def forward_score_scale(judged: Judged) -> Record:
    """The factor on the scores (scale, and the base change of the exponential) is the exact one.

    The error of O is projected on its derivative with respect to the scale (bounds/THEORY.md section 9).
    Judged over all problems of a dtype with ordinary values.
    """
    return _judge(judged, "scale")


@check("forward.cast_of_p", faults="P", grouped=True)
def forward_cast_of_p(judged: Judged) -> Record:
    """P is rounded to nearest into its format, not truncated.

    The error of O is projected on the mean error that truncation makes (bounds/THEORY.md section 9).
    Judged over all problems of a dtype with ordinary values.
    """
    return _judge(judged, "cast")
