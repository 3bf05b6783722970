"""How far the computed softmax weights can be from the exact ones: THEORY.md sections 3.2 to 3.5."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from flashcheck.arithmetic import Arithmetic, Machine
from flashcheck.bounds.numbers import UNIT, exp_clipped, is_power_of_two
from flashcheck.bounds.rows import SoftmaxRows
from flashcheck.bounds.scores import ScoreError
from flashcheck.bounds.tiling import tiling_of
from flashcheck.formats import half_ulp


@dataclass(frozen=True, slots=True)
class WeightErrors:
    """Errors of the softmax weights, (B, H, Nq, n) unless said; logarithms of factors.

    Attributes:
        own_max: (B, H, Nq, 1) largest score error of the row: limits the error of every running maximum.
        relative: |delta| of each weight up to a factor common to the row.
        kernel: the same in the kernel's own units exp(s - m), the common factor included.
        local: error of the weight as it is rounded, before rescaling.
        chain: error added by rescaling alone.
        running_max: the maximum each weight was taken against, or None.
        rescales: number of rescalings; exp_error: log of 1 + the error of one exponential.
        denominator: (B, H, Nq, 1) lower limit of the computed row sum, in kernel units.
        overflow: (B, H, Nq, 1) rows in which an exponential may overflow.
    """

    own_max: Tensor
    relative: Tensor
    kernel: Tensor
    local: Tensor
    chain: Tensor
    running_max: Tensor | None
    rescales: int
    exp_error: float
    flush: float
    denominator: Tensor
    overflow: Tensor


def weight_errors(
    rows: SoftmaxRows,
    errors: ScoreError,
    arithmetic: Arithmetic,
    machine: Machine,
) -> WeightErrors:
    """Terms [W1] to [W6] of THEORY.md section 3.2 to 3.4."""
    own, visible = rows.own, rows.visible
    own_max = own.amax(-1, keepdim=True) if own.shape[-1] else torch.zeros_like(rows.row_max)
    gap = rows.row_max - rows.scores
    size = rows.row_max.abs() + own_max
    flush_limit = machine.exp_flush if arithmetic.exp_flush is None else arithmetic.exp_flush
    exp_error = -math.log1p(-(machine.exp_error if arithmetic.exp_error is None else arithmetic.exp_error))
    constant = 0.0 if errors.additive else errors.constant
    roundings = 2 if arithmetic.scale_placement == "exponent_subtract_first" else 1
    argument = constant * gap + roundings * UNIT * (gap + own + own_max)  # [W1], [W2]
    tiling = tiling_of(
        torch.where(visible, rows.scores, -torch.inf), rows.row_max.squeeze(-1), arithmetic, rows.has_sink
    )
    running, rescales = tiling.running_max, tiling.rescales
    fma = arithmetic.scale_placement == "exponent_fma"
    # The common factor 2^rho of a row, |rho| <= u|m| log2(e), leaves the range of P (of fp32 at most).
    limit = min(80.0, -arithmetic.probability_format.min_exponent * math.log(2.0))
    chain = torch.zeros_like(gap)
    if rescales:  # [W3], [W4]
        behind = gap if running is None else rows.row_max - running
        stale = arithmetic.rescale_threshold * math.log(2.0)
        chain = 2 * UNIT * (behind + 2 * own_max + stale)
    mismatch = torch.zeros_like(gap)
    reference = torch.maximum(rows.scores.abs(), rows.row_max.abs()) if running is None else running.abs()
    if rescales and fma:
        mismatch = UNIT * (reference + own_max + size)
    relative = own + argument + chain + mismatch + exp_error * (1 + rescales)  # [W5]
    kernel = relative + own_max + UNIT * size
    local = own + own_max + argument + exp_error + (UNIT * (reference + own_max) if fma else 0.0)
    if not is_power_of_two(arithmetic.probability_scale):
        local = local + UNIT
    zero = torch.zeros_like(gap)
    relative, kernel = torch.where(visible, relative, zero), torch.where(visible, kernel, zero)
    flush = (1 + rescales) * flush_limit
    # [W6] The key that the kernel takes for the maximum weighs exp2(rho), |rho| <= 2 u |m|.
    least = torch.exp(-(2 * UNIT * size + exp_error).clamp(max=700.0))
    largest = size
    if reference.shape[-1]:  # any running maximum, not only the last one
        largest = torch.where(visible, reference + own_max, 0.0).amax(-1, keepdim=True).maximum(size)
    total = torch.exp(rows.log_p - kernel).sum(-1, keepdim=True) * rows.row_sum
    return WeightErrors(
        own_max=own_max,
        relative=relative,
        kernel=kernel,
        local=torch.where(visible, local, zero),
        chain=torch.where(visible, chain, zero),
        running_max=running,
        rescales=rescales,
        exp_error=exp_error,
        flush=flush,
        denominator=torch.maximum(total, least),
        overflow=(4 * UNIT * largest > limit) & fma,
    )


@dataclass(frozen=True, slots=True)
class ProbabilityRounding:
    """Upper limits on the computed weights p~ and on the error of rounding them, as shares of the row."""

    largest: Tensor
    error: Tensor


def probability_rounding(
    rows: SoftmaxRows, weights: WeightErrors, arithmetic: Arithmetic
) -> ProbabilityRounding:
    """Term [P1] of THEORY.md section 3.5; also the limits p~ <= exp(D) p / sum p exp(-D)."""
    spread = torch.exp(rows.log_p - weights.relative).sum(-1, keepdim=True)
    largest = (exp_clipped(rows.log_p + weights.relative) / spread).nan_to_num(1.0, 1.0).clamp(max=1.0)
    centred = centred_errors(rows, weights)
    spread_centred = torch.exp(rows.log_p - centred).sum(-1, keepdim=True)
    alternative = (exp_clipped(rows.log_p + centred) / spread_centred).nan_to_num(1.0, 1.0)
    largest = torch.where(rows.visible, torch.minimum(largest, alternative), 0.0)
    fmt, factor = arithmetic.probability_format, arithmetic.probability_scale
    if fmt.precision >= 24:
        return ProbabilityRounding(largest, torch.zeros_like(largest))
    floor = fmt.quantum / (2 * factor)
    if arithmetic.normalise == "before_product":
        error = torch.maximum(fmt.unit_roundoff * largest, torch.full_like(largest, floor))
        return ProbabilityRounding(largest, torch.where(rows.visible, torch.minimum(error, largest), 0.0))
    error = torch.maximum(fmt.unit_roundoff * largest, floor / weights.denominator)
    stale = 2.0**arithmetic.rescale_threshold
    if weights.running_max is not None and arithmetic.rescale_threshold == 0:
        behind = weights.running_max - rows.row_max
        local = (
            half_ulp(factor * exp_clipped(rows.scores - weights.running_max + weights.local), fmt) / factor
        )
        growth = weights.chain + 2 * weights.own_max + weights.exp_error * weights.rescales
        error = torch.minimum(error, local * exp_clipped(behind + growth) / weights.denominator)
    saturates = factor * stale * exp_clipped(weights.local) >= fmt.overflow_threshold
    error = torch.where(saturates, largest, torch.minimum(error, largest))
    if not is_power_of_two(factor):
        error = error + UNIT * largest
    return ProbabilityRounding(largest, torch.where(rows.visible, error, 0.0))


def centred_errors(rows: SoftmaxRows, weights: WeightErrors) -> Tensor:
    """Errors relative to the largest key's: D_j + D_top, and 0 for that key (THEORY.md 3.4)."""
    if not rows.scores.shape[-1]:
        return weights.relative
    top = torch.where(rows.visible, rows.scores, -torch.inf).argmax(-1, keepdim=True)
    centred = weights.relative + weights.relative.gather(-1, top)
    return centred.scatter(-1, top, 0.0)
