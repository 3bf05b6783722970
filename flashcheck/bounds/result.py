"""What a bound returns for one pass of one problem."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from flashcheck.bounds.interval import Interval
from flashcheck.bounds.scores import ScoreError


@dataclass(frozen=True, slots=True)
class TensorBound:
    """Bound and prediction for one output tensor.

    Attributes:
        interval: the worst-case acceptance interval (tier A).
        predicted_rms: predicted root mean square of (stored - exact) per element; same shape.
        predictable: boolean, same shape: elements where the prediction's assumptions hold.
        prediction_gates: the prediction is sharp enough to reject by (THEORY.md section 5); otherwise
            the ratio measured / predicted is reported only.
        centred: the interval around the predicted roundings (tier C), or None where the declaration
            does not determine them.
    """

    interval: Interval
    predicted_rms: Tensor
    predictable: Tensor
    prediction_gates: bool
    centred: Interval | None = None


@dataclass(frozen=True, slots=True)
class ForwardBound:
    """Bounds for the forward pass: out (B, H, Nq, dv), lse (B, H, Nq); ``scores``: the errors of the
    scores, which a backward recomputes (None: not kept)."""

    out: TensorBound
    lse: TensorBound
    scores: ScoreError | None = None


@dataclass(frozen=True, slots=True)
class BackwardBound:
    """Bounds for the gradients by name: dq, dk, dv, and dbias and dsink where the problem has them."""

    tensors: dict[str, TensorBound]
