"""What a report shows of one output tensor beyond its worst element: all margins, a point per problem."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, field

import torch
from torch import Tensor

from flashcheck.checks.measure import Measured
from flashcheck.checks.record import Location
from flashcheck.inputs.spec import ProblemSpec
from flashcheck.inputs.values import FAMILIES

BINS = 20
"""Bins of equal width over margins in (0, 1]."""


@dataclass(frozen=True, slots=True)
class Point:
    """One problem's worst element, and its rms error where one is predicted.

    Attributes:
        error, bound, margin: of the element with the largest margin; inf for a NaN that is not accepted.
        rms_error, rms_predicted: over the predictable elements, relative to the rms of their exact values.
    """

    spec: ProblemSpec
    error: float
    bound: float
    margin: float
    rms_error: float | None
    rms_predicted: float | None


@dataclass(slots=True)
class Detail:
    """Grows by one problem at a time.

    Attributes:
        exact: elements without any error; bins: elements per bin of margin; above: margin over 1.
        points: one per problem, in the order in which they were judged.
        worst_margins: (rows, columns) margins of the head that holds the worst element so far.
    """

    exact: int = 0
    bins: list[int] = field(default_factory=lambda: [0] * BINS)
    above: int = 0
    points: list[Point] = field(default_factory=list)
    worst_margins: Tensor | None = None

    def add(self, measured: Measured, spec: ProblemSpec, is_worst: bool) -> None:
        """Adds one problem; ``is_worst``: it holds the largest margin so far."""
        some = measured.margin[measured.margin > 0].double()
        inside = some[some <= 1]
        self.exact += measured.elements - int(some.numel())
        self.above += int(some.numel() - inside.numel())
        counts = torch.histc(inside, bins=BINS, min=0.0, max=1.0).long().tolist() if inside.numel() else []
        self.bins = [a + b for a, b in zip(self.bins, counts, strict=True)] if counts else self.bins
        worst = measured.worst
        if worst is None:
            return
        self.points.append(Point(spec, _error(worst), worst.bound, worst.margin, *_relative_rms(measured)))
        if is_worst and measured.margin.ndim == 4:
            self.worst_margins = measured.margin[worst.index[0], worst.index[1]].clone()

    def typical_rms(self) -> tuple[float, float] | None:
        """Medians over problems with ordinary values of ``rms_error`` and of ``rms_predicted``."""
        pairs = [
            (p.rms_error, p.rms_predicted)
            for p in self.points
            if p.rms_error is not None
            and p.rms_predicted is not None
            and "ordinary" in FAMILIES[p.spec.family].properties
        ]
        if not pairs:
            return None
        return statistics.median(e for e, _ in pairs), statistics.median(p for _, p in pairs)


def _error(worst: Location) -> float:
    """|got - exact|: 0 for an infinity or NaN that is right, inf for one that is not."""
    if worst.got == worst.exact or worst.margin == 0:
        return 0.0
    error = abs(worst.got - worst.exact)
    return math.inf if math.isnan(error) else error


def _relative_rms(measured: Measured) -> tuple[float | None, float | None]:
    if measured.rms is None or not 0 < measured.rms.reference < math.inf:
        return None, None
    reference = measured.rms.reference
    sums = (float(measured.rms.measured.sum()), float(measured.rms.predicted.sum()))
    return math.sqrt(sums[0] / reference), math.sqrt(sums[1] / reference)
