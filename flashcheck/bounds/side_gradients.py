"""Predicted rms errors of the gradients of a bias and of a sink: THEORY.md section 5. Reported only."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from flashcheck.arithmetic import Arithmetic, Machine
from flashcheck.bounds.accumulation import ROUNDING_RMS, accumulation_variance
from flashcheck.bounds.numbers import LARGEST_LINEAR, UNIT
from flashcheck.bounds.pairs import PairErrors
from flashcheck.bounds.result import Prediction
from flashcheck.bounds.rms import after_rounding
from flashcheck.bounds.rms_backward import delta_variance, grad_products
from flashcheck.bounds.score_noise import ScoreNoise
from flashcheck.formats import format_of
from flashcheck.oracle.quantities import BackwardQuantities, ForwardQuantities
from flashcheck.problem import Problem


@dataclass(frozen=True)
class SideGradients:
    """What the predictions are made of.

    Attributes:
        lse: (B, H, Nq) the stored log-sum-exp.
    """

    problem: Problem
    forward: ForwardQuantities
    exact: BackwardQuantities
    lse: Tensor
    pairs: PairErrors
    noise: ScoreNoise
    arithmetic: Arithmetic
    machine: Machine

    def bias(self) -> Prediction:
        """dbias: dS before the cap's derivative, summed where the bias was broadcast.

        The log-sum-exp's roundings and delta are common to a row: where the sum runs over the keys they add
        up before they are squared.
        """
        problem, pairs, exact = self.problem, self.pairs, self.exact.dbias
        assert problem.bias is not None
        assert exact is not None
        ds, p = pairs.ds_plain, pairs.p
        own = torch.addcmul(self.noise.variance, pairs.argument, pairs.argument, value=_SQUARE)
        own.add_((pairs.exp_error / 1.73) ** 2 + UNIT**2 / 3).mul_(ds.square())
        products = grad_products(problem, self.exact, self.arithmetic, self.machine)
        own.addcmul_(p.square(), products.variance(), value=problem.v_descale**2)
        drift = torch.zeros_like(ds) if self.noise.bias is None else self.noise.bias * ds
        if (bias := products.bias()) is not None:
            drift.addcmul_(p, bias, value=problem.v_descale)
        dims = [d for d in range(4) if problem.bias.shape[d] == 1 and ds.shape[d] != 1]
        along = [d for d in dims if d == 3]
        rows = _summed(p, along).square() * self._delta
        rows = rows + _summed(ds, along).square() * self._reference
        variance = _summed(own, dims) + _summed(rows, [d for d in dims if d != 3])
        variance = variance + _summed(drift, dims).square()
        terms = math.prod(ds.shape[d] for d in dims)
        squares = _summed(ds.square(), dims)
        variance = variance + accumulation_variance(self.machine.vector, terms, exact, squares)
        return self._prediction(exact, variance, problem.bias.dtype)

    def sink(self) -> Prediction:
        """dsink = -sum of exp(sink - L) delta."""
        problem, exact = self.problem, self.exact.dsink
        assert problem.sink is not None
        assert exact is not None
        sink = problem.sink.double().view(1, -1, 1)
        seen = torch.isfinite(self.lse)
        stored = torch.where(seen, self.lse.double(), 0.0)
        weight = torch.where(seen, torch.exp(sink - stored), 0.0)
        log_weight = (sink - stored).square() * _SQUARE + (self.pairs.exp_error / 1.73) ** 2 + UNIT**2 / 3
        log_weight = log_weight + self._reference.squeeze(-1)
        term = weight * self.exact.delta
        variance = term.square() * log_weight + weight.square() * self._delta.squeeze(-1)
        terms = term.shape[0] * term.shape[2]
        summed = accumulation_variance(self.machine.vector, terms, exact, term.square().sum((0, 2)))
        return self._prediction(exact, variance.sum((0, 2)) + summed, problem.sink.dtype)

    @property
    def _delta(self) -> Tensor:
        """Variance of delta, (B, H, Nq, 1)."""
        return delta_variance(self.problem, self.forward, self.exact, self.machine, self.arithmetic)

    @property
    def _reference(self) -> Tensor:
        """Variance of the log-sum-exp in the exponent, or of an eager softmax's division; (B, H, Nq, 1)."""
        stored = torch.where(torch.isfinite(self.lse), self.lse.double(), 0.0)
        variance = 2 * _SQUARE * stored.square().unsqueeze(-1)
        if not self.arithmetic.keeps_probabilities:
            return variance
        one = torch.ones_like(variance)
        summed = accumulation_variance(self.machine.vector, self.problem.num_keys, one, one)
        return variance + summed + (0.6 * self.machine.division_error) ** 2

    def _prediction(self, exact: Tensor, variance: Tensor, dtype: torch.dtype) -> Prediction:
        holds = torch.isfinite(exact) & torch.isfinite(variance) & (self.pairs.worst <= LARGEST_LINEAR)
        value, variance = torch.where(holds, exact, 0.0), torch.where(holds, variance, 1.0)
        rms = after_rounding(value, variance, format_of(dtype))
        return Prediction.where(rms, holds)


_SQUARE = (ROUNDING_RMS * UNIT) ** 2


def _summed(x: Tensor, dims: list[int]) -> Tensor:
    return x.sum(dims, keepdim=True) if dims else x
