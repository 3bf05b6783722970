"""Variance and mean error of computed scores. THEORY.md section 5."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from flashcheck.arithmetic import Arithmetic, Machine
from flashcheck.bounds.accumulation import ROUNDING_RMS
from flashcheck.bounds.numbers import UNIT
from flashcheck.bounds.products import weighted
from flashcheck.bounds.truncation import DotProducts
from flashcheck.formats import half_ulp
from flashcheck.oracle.quantities import ForwardQuantities
from flashcheck.problem import Problem


@dataclass(frozen=True)
class ScoreNoise:
    """Both, computed when asked for and once; not to be changed in place."""

    problem: Problem
    exact: ForwardQuantities
    arithmetic: Arithmetic
    machine: Machine

    @cached_property
    def variance(self) -> Tensor:
        """``score_variance``."""
        return score_variance(self.problem, self.exact, self.arithmetic, self.machine)

    @cached_property
    def bias(self) -> Tensor | None:
        """``score_bias``."""
        return score_bias(self.problem, self.exact, self.arithmetic, self.machine)


def score_variance(
    problem: Problem, exact: ForwardQuantities, arithmetic: Arithmetic, machine: Machine
) -> Tensor:
    """Variance of each computed score, (B, H, Nq, Nk); hidden pairs hold anything finite."""
    scale = problem.effective_scale
    dot, products = _dot(problem, exact, arithmetic, machine), exact.products
    variance = dot.variance().mul_(scale**2)
    if arithmetic.scale_placement == "operands":
        variance.add_(dot.squares * scale**2, alpha=2 * (ROUNDING_RMS * UNIT) ** 2)
    if arithmetic.scale_placement == "scores" or not machine.fused_multiply_add:
        variance.addcmul_(products, products, value=(ROUNDING_RMS * UNIT) ** 2)
    if arithmetic.score_format is not None and scale:
        half = half_ulp((products / scale).abs() * arithmetic.score_scale, arithmetic.score_format)
        variance.addcmul_(half, half, value=(scale / arithmetic.score_scale) ** 2 / 3)
    if problem.softcap is not None:
        variance.mul_(softcap_slope(problem, exact).square())
        variance.add_((machine.tanh_error * problem.softcap) ** 2 / 3)
    added = 2 * int(problem.bias is not None or problem.alibi_slopes is not None)
    again = arithmetic.score_roundings + added
    if again or arithmetic.scaled_score_format is not None:
        scores = exact.scores.nan_to_num(0.0, 0.0, 0.0)
        variance.addcmul_(scores, scores, value=again * (ROUNDING_RMS * UNIT) ** 2)
        if arithmetic.scaled_score_format is not None:
            variance.add_(half_ulp(scores, arithmetic.scaled_score_format).square_(), alpha=1 / 3)
    return variance


def score_bias(
    problem: Problem, exact: ForwardQuantities, arithmetic: Arithmetic, machine: Machine
) -> Tensor | None:
    """Mean error of each score, (B, H, Nq, Nk): it moves the scores of a row together, so it does not
    average out over keys as independent errors do. None where there is none."""
    if machine.accumulator(arithmetic.product_format or arithmetic.input_format).rounding == "nearest":
        return None
    bias = _dot(problem, exact, arithmetic, machine).bias()
    if bias is None:
        return None
    bias.mul_(problem.effective_scale)
    return bias if problem.softcap is None else bias.mul_(softcap_slope(problem, exact))


def _dot(problem: Problem, exact: ForwardQuantities, arithmetic: Arithmetic, machine: Machine) -> DotProducts:
    """q . k of the stored values."""
    fmt, scale = arithmetic.product_format or arithmetic.input_format, problem.effective_scale
    q, k = problem.q.double(), problem.k.double().mT
    total = exact.products / scale if scale else weighted(problem, q, k)
    return DotProducts(problem, machine.accumulator(fmt), q, k, total)


def softcap_slope(problem: Problem, exact: ForwardQuantities) -> Tensor:
    """The derivative of the cap, sech(x / c)^2."""
    cap = problem.softcap or 1.0
    return torch.cosh((exact.products / cap).clamp_(-350, 350)).pow_(-2.0)
