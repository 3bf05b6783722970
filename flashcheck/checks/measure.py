"""Numbers of one output tensor against its bound and its prediction."""

from __future__ import annotations

from dataclasses import dataclass

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


@dataclass(frozen=True, slots=True)
class Measured:
    """One output tensor, judged.

    Attributes:
        margin: |got - exact| / bound per element, 0 where the element is not judged.
        got: the kernel's values, float64.
        elements: how many were judged.
        over: how many exceed their bound.
        worst: the element with the largest margin; None where none was judged.
        slack: median of bound / |error| over judged elements with an error; inf where all are exact.
        rms: sums for the ratio measured / predicted, or None where nothing is predictable.
        gates: the prediction is sharp enough to reject by.
        bias: sums for the mean error away from zero, over the same elements as ``rms``.
    """

    margin: Tensor
    got: Tensor
    elements: int
    over: int
    worst: Location | None
    slack: float
    rms: RmsSums | None
    gates: bool
    bias: BiasSums | None = None


def measure(name: str, got: Tensor, bound: TensorBound, live: Tensor) -> Measured:
    """Measures ``got`` where ``live`` holds; ``live`` may lack the last dimension (whole rows)."""
    got = got.to(torch.float64)
    judged = live if got.ndim == live.ndim else live.unsqueeze(-1).expand_as(got)
    margin = torch.where(judged, bound.interval.margin(got), 0.0)
    elements = int(judged.sum())
    error = (got - bound.interval.exact).abs()
    single = judged
    if got.ndim == 4 and elements:
        single = judged & distinct_rows(got, bound.interval.exact).unsqueeze(-1)
    return Measured(
        margin=margin,
        got=got,
        elements=elements,
        over=int((margin > 1).sum()),
        worst=_worst(name, margin, got, bound) if elements else None,
        slack=_slack(error, bound.interval.bound, judged),
        rms=_rms(error, bound, single),
        gates=bound.prediction_gates,
        bias=_bias(got, bound, single),
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
        bound=float(interval.bound.flatten()[flat]),
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
