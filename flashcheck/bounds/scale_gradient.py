"""The gradient of the scale, dscale = sum_ij dS_ij (q_i . k_j): its bound and its predicted rms error.
THEORY.md sections 4.3 [G8] and 5."""

from __future__ import annotations

import torch
from torch import Tensor

from flashcheck.arithmetic import Arithmetic, Machine
from flashcheck.bounds.accumulation import ROUNDING_RMS, accumulation_variance
from flashcheck.bounds.interval import Interval, rounded_interval
from flashcheck.bounds.numbers import FP32_MAX, LARGEST_LINEAR, UNIT, flushed
from flashcheck.bounds.pairs import PairErrors
from flashcheck.bounds.result import Prediction
from flashcheck.bounds.rms import after_rounding
from flashcheck.bounds.rms_backward import delta_variance, grad_products
from flashcheck.bounds.score_noise import score_bias, score_variance, softcap_slope
from flashcheck.bounds.scores import ScoreError
from flashcheck.formats import FP32
from flashcheck.oracle.quantities import BackwardQuantities, ForwardQuantities
from flashcheck.problem import Problem


def scale_interval(
    problem: Problem,
    forward: ForwardQuantities,
    exact: BackwardQuantities,
    pairs: PairErrors,
    scores: ScoreError,
    machine: Machine,
) -> Interval:
    """[G8] What fp32 may hold; q.k errs as in [S1], taken from the scores' errors. Shape ()."""
    scale = abs(problem.effective_scale)
    if not scale:  # q.k cannot be had from scale q.k
        return rounded_interval(exact.dscale, torch.full_like(exact.dscale, torch.inf), FP32)
    descale = problem.q_descale * problem.k_descale
    products = (forward.products.abs() / scale).nan_to_num_(0.0, 0.0) * descale
    product_error = (scores.own / scale * descale).add_(products, alpha=2 * UNIT)
    size = pairs.ds_size + pairs.ds_error
    term = pairs.ds_error * products + size * product_error
    total = (size * (products + product_error)).sum()
    error = term.sum() + (machine.vector.gamma(size.numel()) + 2 * UNIT) * total
    if lost := flushed(machine):
        error = error + lost * (products + size + 4).sum()
    value = exact.dscale
    if not bool(torch.isfinite(value + error)):
        error = (
            error.nan_to_num(torch.inf) if bool(torch.isfinite(value)) else torch.full_like(error, torch.inf)
        )
        value = value.nan_to_num(0.0, 0.0, 0.0)
    overflow = ~(total < FP32_MAX)
    for past in (pairs.overflow_p, pairs.overflow_ds, scores.overflow):
        overflow = overflow if past is None else overflow | past.any()
    return rounded_interval(value, error, FP32, overflow)


def scale_prediction(
    problem: Problem,
    forward: ForwardQuantities,
    exact: BackwardQuantities,
    lse: Tensor,
    pairs: PairErrors,
    arithmetic: Arithmetic,
    machine: Machine,
) -> Prediction:
    """Predicted rms error of dscale, shape (); reported only."""
    scale = problem.effective_scale
    holds = pairs.worst <= LARGEST_LINEAR and scale != 0 and bool(torch.isfinite(exact.dscale))
    if not holds:
        zero = torch.zeros_like(exact.dscale)
        return Prediction(zero, zero.bool())
    inner = problem.q_descale * problem.k_descale / scale  # q.k = inner * (scale q.k)
    x = forward.products * inner
    term = pairs.ds * x
    # An error of scale q.k moves P, the cap's derivative, and the factor beside dS.
    uncapped = problem.replaced(softcap=None)
    slope, through = torch.ones_like(x), term + pairs.ds * inner
    if problem.softcap is not None:
        cap, slope = problem.softcap, softcap_slope(problem, forward)
        tanh = torch.tanh(forward.products / cap)
        through = term * (slope - 2 / cap * tanh) + pairs.ds * inner
    variance = through.square() * score_variance(uncapped, forward, arithmetic, machine)
    if problem.softcap is not None:
        both = x * (cap * pairs.ds - 2 * tanh * pairs.ds_plain)
        variance.add_(both.square_(), alpha=machine.tanh_error**2 / 3)
    own = (ROUNDING_RMS * UNIT * pairs.argument).square_().add_((pairs.exp_error / 1.73) ** 2 + UNIT**2 / 3)
    variance.addcmul_(term.square(), own)
    products = grad_products(problem, exact, arithmetic, machine)
    moved = pairs.p * slope * x
    variance.addcmul_(moved.square(), products.variance(), value=problem.v_descale**2)
    # Of a row as a whole: the log-sum-exp in the exponent, and delta.
    reference = torch.where(torch.isfinite(lse), lse.double(), 0.0)
    rows = 2 * (ROUNDING_RMS * UNIT * reference * term.sum(-1)).square()
    delta = delta_variance(problem, forward, exact, machine, arithmetic).squeeze(-1)
    rows.addcmul_(moved.sum(-1).square(), delta)
    # Summed along the rows, then over them.
    row_sums = term.sum(-1)
    rows.add_(accumulation_variance(machine.vector, problem.num_keys, row_sums, term.square().sum(-1)))
    whole = accumulation_variance(machine.vector, rows.numel(), row_sums.sum(), row_sums.square().sum())
    total = variance.sum() + rows.sum() + whole
    drift = torch.zeros_like(total)
    if (bias := score_bias(uncapped, forward, arithmetic, machine)) is not None:
        drift = (through * bias).sum()
    if (bias := products.bias()) is not None:
        drift = drift + (bias * moved).sum() * problem.v_descale
    rms = after_rounding(exact.dscale, total + drift.square(), FP32)
    return Prediction.where(rms, torch.ones_like(rms, dtype=torch.bool))
