"""Accuracy against the predicted rms error, over groups of problems.

A worst-case bound cannot see a small extra rounding; the mean square error can. The ratio

    R^2 = sum of squared errors / sum of squared predictions

is taken over rows of many problems, each problem scaled so that its rows weigh 1 (a problem with a
large V would drown the others). Elements of a row share the errors of P and are not independent, so
the standard error comes from whole rows, and once more from whole problems; the larger one counts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from flashcheck.checks import ratios
from flashcheck.checks.judged import Judged
from flashcheck.checks.measure import Measured
from flashcheck.checks.record import Record, Status
from flashcheck.checks.registry import check, not_applicable

LARGEST_RATIO = 1.1
"""Above this (and STANDARD_ERRORS away from 1) a kernel rounds more than it declares. Honest kernels are
measured at 0.7..1.07 on ordinary data, one more rounding of P gives 1.2 (THEORY.md section 5)."""

STANDARD_ERRORS = 5.0
FEWEST_ROWS = 100.0
"""Rows (of equal weight) below which the ratio is reported and judges nothing."""


@dataclass(slots=True)
class RmsTally:
    """Running sums of one group of problems."""

    rows: float = 0.0
    measured: float = 0.0
    row_squares: ratios.Squares = (0.0, 0.0, 0.0)
    problem_squares: ratios.Squares = (0.0, 0.0, 0.0)

    def add(self, measured: Measured) -> None:
        """Adds one tensor of one problem; nothing where nothing is predictable."""
        if measured.rms is None:
            return
        e, p = measured.rms.measured, measured.rms.predicted
        largest = float(p.max())
        if not (math.isfinite(largest) and largest > 0):
            return
        e, p = e / largest, p / largest  # squares of squared subnormal errors would be 0
        weight = float(p.sum()) / float(p.square().sum())
        if not bool(torch.isfinite(e).all()):
            return
        e, p = e * weight, p * weight
        sum_e, sum_p = float(e.sum()), float(p.sum())
        self.rows += sum_p
        self.measured += sum_e
        self.row_squares = ratios.plus(self.row_squares, ratios.of_rows(e, p))
        self.problem_squares = ratios.plus(self.problem_squares, ratios.of_problem(sum_e, sum_p))

    @property
    def ratio(self) -> float | None:
        """R = measured rms / predicted rms; None before anything was added."""
        return math.sqrt(self.measured / self.rows) if self.rows > 0 else None

    @property
    def standard_error(self) -> float:
        """Of R^2."""
        return ratios.standard_error(self.measured, self.rows, self.row_squares, self.problem_squares)

    @property
    def judges(self) -> bool:
        """Enough rows for a verdict."""
        return self.rows >= FEWEST_ROWS

    @property
    def too_large(self) -> bool:
        """The kernel's errors exceed the prediction by more than chance and the model's slack allow."""
        if not self.judges:
            return False
        square = self.measured / self.rows
        return square > LARGEST_RATIO**2 and square - STANDARD_ERRORS * self.standard_error > 1.0

    def verdict(self, tensor: str, problem: str = "") -> Record:
        """forward.rms on this group."""
        name = "forward.rms" if tensor == "O" else "backward.rms"
        ratio = self.ratio
        if ratio is None or not self.judges:
            return not_applicable(name, f"{self.rows:.0f} predictable rows, fewer than {FEWEST_ROWS:.0f}")
        line = f"{tensor}: measured rms error is {ratio:.3f} x the predicted one over {self.rows:.0f} rows"
        if not self.too_large:
            return Record(name, Status.PASS, line, problem=problem)
        error = self.standard_error / (2 * ratio)
        evidence = (
            f"standard error of the ratio {error:.3f}; accepted up to {LARGEST_RATIO}",
            "every element may still be inside its bound: something is rounded once more, or in a narrower "
            "format, than the kernel declares",
        )
        return Record(name, Status.FAIL, line, evidence=evidence, problem=problem)


@check("forward.rms", faults="PZ", grouped=True)
def forward_rms(judged: Judged) -> Record:
    """The rms error of O is not above the predicted one: no rounding that is not declared.

    Judged over all problems of a dtype with ordinary values; on one problem alone it applies where
    enough rows are predictable.
    """
    tally = RmsTally()
    measured = judged.measured["O"]
    if not measured.gates:
        return not_applicable("forward.rms", "the prediction is not sharp for this output format")
    tally.add(measured)
    return tally.verdict("O", judged.problem.describe())


@check("backward.rms", faults="PZ", grouped=True)
def backward_rms(judged: Judged) -> Record:
    """The rms errors of dQ, dK and dV are not above the predicted ones.

    Judged over all problems of a dtype with ordinary values, tensor by tensor; on one problem alone the
    worst of the three counts.
    """
    name = "backward.rms"
    if judged.kernel.backward is None or not judged.backward_defined:
        return not_applicable(name, "no backward is declared, or the exact forward is not finite")
    verdicts = []
    for tensor in ("dQ", "dK", "dV"):
        measured = judged.measured_gradients[tensor]
        if measured.gates:
            tally = RmsTally()
            tally.add(measured)
            verdicts.append(tally.verdict(tensor, judged.problem.describe()))
    judging = [v for v in verdicts if v.status is not Status.NOT_APPLICABLE]
    if not judging:
        return not_applicable(name, "the prediction is not sharp for this output format, or rows are few")
    return next((v for v in judging if v.failed), judging[0])
