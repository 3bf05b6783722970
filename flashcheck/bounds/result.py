"""What a bound returns for one pass of one problem."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from flashcheck.bounds.interval import Interval
from flashcheck.bounds.scores import ScoreError
from flashcheck.bounds.weights import WeightErrors


@dataclass(frozen=True, slots=True)
class Prediction:
    """Predicted root mean square of (stored - exact) per element, and the elements (boolean) where the
    assumptions behind it hold; the rms is 0 elsewhere."""

    rms: Tensor
    holds: Tensor

    @classmethod
    def where(cls, rms: Tensor, holds: Tensor) -> Prediction:
        """``rms`` where ``holds`` and it is finite: an infinite one predicts nothing."""
        if not (math.isfinite(float(rms.sum())) and bool(holds.all())):
            holds = holds & torch.isfinite(rms)
            rms = torch.where(holds, rms, 0.0)
        return cls(rms, holds)


@dataclass(frozen=True)
class TensorBound:
    """Bound and prediction for one output tensor; whatever a verdict does not ask for is not computed.

    Attributes:
        interval: the worst-case acceptance interval (tier A).
        predict: makes the prediction, called at most once.
        prediction_gates: the prediction is sharp enough to reject by (THEORY.md section 5); otherwise
            the ratio measured / predicted is reported only.
        centre: makes the interval around the predicted roundings (tier C), or returns None where the
            declaration does not determine them; called at most once.
        alike: boolean, broadcasts over the interval: elements whose P may all be rounded to one side, which
            counts where ``centre`` does not know the roundings (None: nowhere).
    """

    interval: Interval
    predict: Callable[[], Prediction]
    prediction_gates: bool
    centre: Callable[[], Interval | None]
    alike: Callable[[], Tensor] | None = None

    @cached_property
    def _prediction(self) -> Prediction:
        return self.predict()

    @property
    def predicted_rms(self) -> Tensor:
        """Shape of the interval."""
        return self._prediction.rms

    @property
    def predictable(self) -> Tensor:
        """Boolean, shape of the interval."""
        return self._prediction.holds

    @cached_property
    def centred(self) -> Interval | None:
        """Tier C."""
        return self.centre()


def unpredicted(interval: Interval) -> TensorBound:
    """Tier A alone."""

    def nothing() -> Prediction:
        zeros = torch.zeros_like(interval.exact)
        return Prediction(zeros, zeros.bool())

    return TensorBound(interval, nothing, prediction_gates=False, centre=lambda: None)


@dataclass(frozen=True, slots=True)
class ForwardBound:
    """Bounds for the forward pass: out (B, H, Nq, dv), lse (B, H, Nq).

    Of what they are made of, kept for others (None: not kept): ``scores``, the errors of the scores, which a
    backward recomputes; ``weights``, the errors of the weights; ``variance``, of O before it is rounded.
    """

    out: TensorBound
    lse: TensorBound
    scores: ScoreError | None = None
    weights: WeightErrors | None = None
    variance: Callable[[], Tensor] | None = None


@dataclass(frozen=True, slots=True)
class BackwardBound:
    """Bounds for the gradients by name: dq, dk, dv, and dbias and dsink where the problem has them."""

    tensors: dict[str, TensorBound]
