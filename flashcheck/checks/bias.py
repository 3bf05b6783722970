"""Signed bias: errors of an honest kernel fall on both sides of the exact value.

A mean error of b predicted standard deviations raises the rms ratio to sqrt(1 + b^2) only: at b = 0.3 by
4 %, which no rms check can reject, while truncation instead of rounding to nearest, a reciprocal of too few
bits or a constant cut short push every element the same way. The statistic is

    B = mean over elements of sign(exact) * (got - expected) / predicted rms

where ``expected`` is what the known roundings of P, dS and the output give (THEORY.md section 6), and the
exact value where they are not known. Known roundings are no bias, though they lean one way wherever weights
are alike: for scores near 0 every P just under 1 is stored as 1 in 8 bits, in every row. B is taken with its
standard error from whole rows and from whole problems, the larger one, as in ``rms``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from flashcheck.checks import ratios
from flashcheck.checks.judged import Judged
from flashcheck.checks.measure import Measured
from flashcheck.checks.record import Record, Status
from flashcheck.checks.registry import check, not_applicable

LARGEST_BIAS = 0.1
"""Means below this are accepted: hardware that truncates its fp32 sums is biased by a little (a share of
2^-24 per step against the output's rounding), and the model predicts sizes, not signs."""

STANDARD_ERRORS = 5.0
FEWEST_ROWS = 100


@dataclass(slots=True)
class BiasTally:
    """Running sums of one group of problems."""

    rows: int = 0
    elements: float = 0.0
    signed: float = 0.0
    row_squares: ratios.Squares = (0.0, 0.0, 0.0)
    problem_squares: ratios.Squares = (0.0, 0.0, 0.0)

    def add(self, measured: Measured) -> None:
        """Adds one tensor of one problem; nothing where nothing is predictable."""
        if measured.bias is None:
            return
        s, n = measured.bias.signed, measured.bias.elements
        sum_s, sum_n = float(s.sum()), float(n.sum())
        if not math.isfinite(sum_s):
            return
        self.rows += int((n > 0).sum())
        self.signed += sum_s
        self.elements += sum_n
        self.row_squares = ratios.plus(self.row_squares, ratios.of_rows(s, n))
        self.problem_squares = ratios.plus(self.problem_squares, ratios.of_problem(sum_s, sum_n))

    @property
    def mean(self) -> float:
        """B; 0 before anything was added."""
        return self.signed / self.elements if self.elements else 0.0

    @property
    def standard_error(self) -> float:
        """Of B."""
        return ratios.standard_error(self.signed, self.elements, self.row_squares, self.problem_squares)

    def verdict(self, tensor: str, problem: str = "") -> Record:
        """forward.bias or backward.bias on this group."""
        name = "forward.bias" if tensor == "O" else "backward.bias"
        if self.rows < FEWEST_ROWS:
            return not_applicable(name, f"{self.rows} predictable rows, fewer than {FEWEST_ROWS}")
        error = self.standard_error
        line = f"{tensor}: mean error {self.mean:+.3f} predicted standard deviations over {self.rows:,} rows"
        if abs(self.mean) - STANDARD_ERRORS * error <= LARGEST_BIAS:
            return Record(name, Status.PASS, line, problem=problem)
        side = "toward" if self.mean < 0 else "away from"
        evidence = (
            f"standard error {error:.3f}; accepted up to {LARGEST_BIAS}; the errors point {side} zero",
            "something is truncated that should be rounded to nearest, or a constant or reciprocal is short",
        )
        return Record(name, Status.FAIL, line, evidence=evidence, problem=problem)


@check("forward.bias", faults="PZ", grouped=True)
def forward_bias(judged: Judged) -> Record:
    """Errors of O fall on both sides of the exact value: their mean is no large part of the predicted rms.

    Judged over all problems of a dtype with ordinary values; on one problem where it has enough rows.
    """
    measured = judged.measured["O"]
    if not measured.gates:
        return not_applicable("forward.bias", "the prediction is not sharp for this output format")
    tally = BiasTally()
    tally.add(measured)
    return tally.verdict("O", judged.problem.describe())


@check("backward.bias", faults="PZ", grouped=True)
def backward_bias(judged: Judged) -> Record:
    """Errors of dQ, dK and dV fall on both sides of the exact values.

    Judged like forward.bias, tensor by tensor.
    """
    name = "backward.bias"
    if judged.kernel.backward is None or not judged.backward_defined:
        return not_applicable(name, "no backward is declared, or the exact forward is not finite")
    verdicts = []
    for tensor in ("dQ", "dK", "dV"):
        measured = judged.measured_gradients.get(tensor)
        if measured is not None and measured.gates:
            tally = BiasTally()
            tally.add(measured)
            verdicts.append(tally.verdict(tensor, judged.problem.describe()))
    judging = [v for v in verdicts if v.status is not Status.NOT_APPLICABLE]
    if not judging:
        return not_applicable(name, "the prediction is not sharp for this output format, or rows are few")
    return next((v for v in judging if v.failed), judging[0])
