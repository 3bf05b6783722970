"""Numbers of one output tensor against its bound and its prediction."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from flashcheck.bounds.copies import distinct_rows
from flashcheck.bounds.result import TensorBound
from flashcheck.checks.record import Location
from flashcheck.formats import round_nearest


@dataclass(frozen=True, slots=True)
class RmsSums:
    """Row sums of squared errors and of squared predictions, over predictable elements; float64 (rows,).
    Rows that are copies of another count once.

    ``reference``: the sum of their squared exact values, all rows together.
    """

    measured: Tensor
    predicted: Tensor
    reference: float


@dataclass(frozen=True, slots=True)
class BiasSums:
    """Row sums of errors away from zero, each over its prediction, and element counts; float64 (rows,)."""

    signed: Tensor
    elements: Tensor


@dataclass(frozen=True)
class Measured:
    """One output tensor, judged; what is not asked for is not computed.

    Attributes:
        margin: |got - exact| / bound per element, 0 where the element is not judged.
        got: the kernel's values, float64.
        elements: how many were judged.
        over: how many exceed their bound.
        worst: the element with the largest margin; None where none was judged.
        gates: the prediction is sharp enough to reject by.
        bound: what it was measured against, and judged: the elements (boolean, shape of ``got``).
    """

    margin: Tensor
    got: Tensor
    elements: int
    over: int
    worst: Location | None
    gates: bool
    bound: TensorBound
    judged: Tensor

    @cached_property
    def slack(self) -> float:
        """Median of bound / |error| over judged elements with an error; inf where all are exact."""
        interval = self.bound.interval
        return _slack((self.got - interval.exact).abs(), interval.bound, self.judged)

    @cached_property
    def rms(self) -> RmsSums | None:
        """Sums for the ratio measured / predicted, or None where nothing is predictable."""
        return _rms((self.got - self.bound.interval.exact).abs(), self.bound, self._single)

    @cached_property
    def bias(self) -> BiasSums | None:
        """Sums for the mean error away from zero, over the same elements as ``rms``."""
        return _bias(self.got, self.bound, self._single)

    @cached_property
    def _single(self) -> Tensor:
        """The judged elements of rows that are no copies of another."""
        if self.got.ndim != 4 or not self.elements:
            return self.judged
        return self.judged & distinct_rows(self.got, self.bound.interval.exact).unsqueeze(-1)


def measure(name: str, got: Tensor, bound: TensorBound, live: Tensor) -> Measured:
    """Measures ``got`` where ``live`` holds; ``live`` may lack the last dimension (whole rows)."""
    judged = live if got.ndim == live.ndim else live.unsqueeze(-1).expand_as(got)
    elements = int(live.sum()) * (got.numel() // live.numel() if live.numel() else 0)
    margin = bound.interval.margin(got)
    if elements < got.numel():
        margin = torch.where(judged, margin, 0.0)
    got = bound.interval.needs(got)[0]
    worst = _worst(name, margin, got, bound) if elements else None
    return Measured(
        margin=margin,
        got=got,
        elements=elements,
        over=0 if worst is None or worst.margin <= 1 else int((margin > 1).sum()),
        worst=worst,
        gates=bound.prediction_gates,
        bound=bound,
        judged=judged,
    )


def _worst(name: str, margin: Tensor, got: Tensor, bound: TensorBound) -> Location:
    flat = int(margin.argmax())
    index = tuple(int(i) for i in np.unravel_index(flat, margin.shape))
    interval = bound.interval
    return Location(
        tensor=name,
        index=index,
        got=float(got[index]),
        exact=float(interval.exact[index]),
        bound=interval.bound_at(index),
        margin=float(margin[index]),
    )


def _slack(error: Tensor, bound: Tensor, judged: Tensor) -> float:
    some = judged & (error > 0) & torch.isfinite(bound) & torch.isfinite(error)
    if not bool(some.any()):
        return torch.inf
    return float((bound[some] / error[some]).median())


def _rms(error: Tensor, bound: TensorBound, judged: Tensor) -> RmsSums | None:
    used = _predictable(error, bound, judged)
    if not bool(used.any()):
        return None
    measured = torch.where(used, error, 0.0).square()
    predicted = torch.where(used, bound.predicted_rms, 0.0).square()
    reference = float(torch.where(used, bound.interval.exact, 0.0).square().sum())
    if error.ndim == 4:
        measured, predicted = measured.sum(-1), predicted.sum(-1)
    return RmsSums(measured.flatten(), predicted.flatten(), reference)


def _bias(got: Tensor, bound: TensorBound, judged: Tensor) -> BiasSums | None:
    exact = bound.interval.exact
    # Roundings of P and of the output that are known lean the same way wherever weights are alike: no bias.
    known = bound.centred
    signed = got - (exact if known is None else round_nearest(known.exact, known.fmt))
    used = _predictable(signed, bound, judged) & (exact != 0)
    if known is not None:
        used &= torch.isfinite(known.error)
    elif bound.alike is not None:
        used &= ~bound.alike()
    if not bool(used.any()):
        return None
    outward = torch.where(used, signed * torch.sign(exact) / bound.predicted_rms, 0.0)
    count = used.double()
    if signed.ndim == 4:
        outward, count = outward.sum(-1), count.sum(-1)
    return BiasSums(outward.flatten(), count.flatten())


def _predictable(error: Tensor, bound: TensorBound, judged: Tensor) -> Tensor:
    # A prediction far below the format's quantum says nothing about what flushing to zero leaves.
    seen = bound.predicted_rms >= bound.interval.fmt.quantum / 4
    return seen & judged & bound.predictable & torch.isfinite(error) & torch.isfinite(bound.predicted_rms)
