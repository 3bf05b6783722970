"""How far a computed score can be from the exact one: THEORY.md section 3.1 and 3.2."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from flashcheck.arithmetic import Accumulator, Arithmetic, Machine
from flashcheck.bounds.numbers import FP32_MAX, SMALLEST_FP32, UNIT, flushed
from flashcheck.bounds.products import per_head, weighted
from flashcheck.bounds.score_noise import ScoreNoise
from flashcheck.formats import FP32, Format, half_ulp
from flashcheck.masks import Everything
from flashcheck.oracle.quantities import ForwardQuantities
from flashcheck.problem import Problem


@dataclass(frozen=True, slots=True)
class ScoreError:
    """Bounds on |computed score - exact score|, (B, H, Nq, Nk), natural-log units, 0 where hidden.

    Attributes:
        own: errors that each score has on its own (products, caps, added terms, roundings).
        constant: relative error of the constant that multiplies every score of the problem; it moves
            all scores of a row together.
        additive: True where bias, ALiBi or a cap stand between the constant and the score, so that its
            error does not act on s - m alone.
        overflow: boolean (B, H, Nq): rows in which a score may leave the range of fp32, or of the format in
            which it is stored; hidden scores too where the softmax is one of whole rows. None: in no row.
        visible: 1.0 where visible and 0.0 where hidden; None where everything is visible.
        noise: their variance and mean, for predictions.
    """

    own: Tensor
    constant: float
    additive: bool
    overflow: Tensor | None
    visible: Tensor | None
    noise: ScoreNoise


def score_error(
    problem: Problem, exact: ForwardQuantities, arithmetic: Arithmetic, machine: Machine
) -> ScoreError:
    """Terms [S1] to [S8] of THEORY.md: everything up to and including the score in fp32."""
    visible = None if isinstance(problem.visibility, Everything) else exact.visible.double()
    noise = ScoreNoise(problem, exact, arithmetic, machine)
    scale = abs(problem.effective_scale)
    q, k = problem.q.double().abs(), problem.k.double().abs()
    operand = arithmetic.product_format or arithmetic.input_format
    unit = machine.accumulator(operand)
    finite = not (q.numel() and k.numel()) or math.isfinite(float(q.amax()) + float(k.amax()))
    if finite:
        magnitude = weighted(problem, q, k.mT)
    else:  # a NaN of a hidden key must not reach the rows that do not see it
        magnitude = torch.where(exact.visible, weighted(problem, q, k.mT), 0.0)
    every_k = per_head(problem, k)
    growth = 1 + unit.gamma(problem.head_dim)
    largest = float(magnitude.amax()) if magnitude.numel() else 0.0
    safe = largest * growth * max(scale, 1.0) < FP32_MAX / 2
    past = None if safe else magnitude * growth >= FP32_MAX
    own = _product_error(magnitude, q, every_k, operand, unit)  # [S1]
    if unit.flush_subnormals:
        own.add_(_flushed(problem, q, k, operand, arithmetic))
    if arithmetic.score_format is not None:  # [S2]
        own = own + _storage_error(magnitude + own, arithmetic)
        if not bool(torch.isfinite(own.sum())):
            past = own.isinf() if past is None else past | own.isinf()
            own = torch.where(past, 0.0, own)  # also where the scale is 0: 0 * inf is NaN
    own.mul_(scale)
    if arithmetic.scale_placement == "operands":  # [S3]
        operand_unit = max(UNIT, 0.0 if arithmetic.product_format is None else operand.unit_roundoff)
        own.mul_(1 + 4 * operand_unit).add_(magnitude, alpha=2 * operand_unit * (1 + operand_unit) * scale)
        root = scale**0.5
        floor = (SMALLEST_FP32 + flushed(machine) * (1 + root)) * root * problem.head_dim
        own.add_(floor * (q.amax(-1, keepdim=True) + every_k.amax(-1).unsqueeze(-2)))
    if lost := flushed(machine):  # the scale, the cap, what is added, the exponent's argument: [S9]
        distance = 0 if problem.alibi_slopes is None else problem.num_queries + problem.num_keys
        own.add_(lost * (16 + scale + distance))
    additive = problem.bias is not None or problem.alibi_slopes is not None or problem.softcap is not None
    own = _after_the_product(own, problem, exact, arithmetic, machine, additive=additive)
    constant = arithmetic.scale_roundings * UNIT
    may_grow = additive or arithmetic.scaled_score_format is not None
    # A softmax of whole rows hides keys by adding -inf to their scores: one that is +inf makes its row NaN.
    added = arithmetic.normalise == "before_product" and visible is not None
    stored = arithmetic.scaled_score_format
    if added and stored is not None and finite:
        hidden = torch.where(exact.visible, 0.0, exact.products.abs() + own)
        if not float(hidden.sum()) < stored.overflow_threshold:
            beyond = hidden >= stored.overflow_threshold
            past = beyond if past is None else past | beyond
    if safe and past is None and finite and not (may_grow and not _all_small(own, exact)):
        own = own if visible is None else own.mul_(visible)
        return ScoreError(own, constant, additive, None, visible, noise)
    sizes = torch.where(exact.visible, exact.scores.abs(), 0.0)
    over = own.isinf() | (scale * magnitude >= FP32_MAX) | (sizes >= FP32_MAX)
    over = over if past is None else over | past
    own = own if past is None else torch.where(past, torch.inf, own)
    rows = (over if added else exact.visible & over).any(-1)
    own = torch.where(exact.visible, own, 0.0)
    return ScoreError(own, constant, additive, rows, visible, noise)


def _all_small(own: Tensor, exact: ForwardQuantities) -> bool:
    """No score error is infinite, no score past fp32's largest number."""
    if not own.numel():
        return True
    largest = float(exact.scores.abs().nan_to_num_(0.0, 0.0).amax())
    return largest < FP32_MAX and math.isfinite(float(own.amax()))


def _after_the_product(
    own: Tensor,
    problem: Problem,
    exact: ForwardQuantities,
    arithmetic: Arithmetic,
    machine: Machine,
    *,
    additive: bool,
) -> Tensor:
    """Terms [S4] to [S8] added to ``own``, in place where that can be."""
    rounded = arithmetic.scale_placement == "scores" or (
        arithmetic.scale_placement == "exponent_fma" and not machine.fused_multiply_add
    )
    products = exact.products.abs() if rounded or additive else None
    if rounded and products is not None:  # [S4]
        own.mul_(1 + UNIT).add_(products, alpha=UNIT)
    if problem.softcap is not None and products is not None:  # [S5]
        own.add_(products.clamp(max=0.4478 * problem.softcap), alpha=3 * UNIT)
        own.add_((machine.tanh_error + UNIT) * problem.softcap)
        products.clamp_(max=problem.softcap)
    again, fmt = arithmetic.score_roundings, arithmetic.scaled_score_format
    if not (additive or again or fmt is not None):
        return own
    sizes = exact.scores.abs().nan_to_num_(0.0, 0.0)
    if additive and products is not None:  # [S6], with |added| <= |s| + |product|
        own.add_(sizes, alpha=5 * UNIT)
        own.add_(products, alpha=3 * UNIT + arithmetic.scale_roundings * UNIT)
    if again:  # [S7]
        own.mul_(1 + again * UNIT).add_(sizes, alpha=again * UNIT)
    if fmt is not None:  # [S8]
        reach = sizes + own
        own = own + torch.where(reach >= fmt.overflow_threshold, torch.inf, half_ulp(reach, fmt))
    return own


def _product_error(magnitude: Tensor, q: Tensor, k: Tensor, operand: Format, unit: Accumulator) -> Tensor:
    """|computed q.k - q.k| for any order of summation: gamma(d) |q|.|k| and the absolute floors."""
    dim = q.shape[-1]
    error = magnitude * unit.gamma(dim)
    error.add_(unit.floor(dim))
    if unit.fraction_bits is not None:
        # A subnormal operand is aligned as if it had the exponent emin (THEORY.md 2.3).
        tiny = 2.0**operand.min_exponent
        steps = -(-dim // unit.block)
        lost = steps * unit.alignment * tiny
        tiny_q, tiny_k = (q > 0) & (q < tiny), (k > 0) & (k < tiny)
        if not bool(tiny_q.any() | tiny_k.any()):
            return error
        has_tiny_q = tiny_q.any(-1, keepdim=True)
        has_tiny_k = tiny_k.any(-1).unsqueeze(-2)
        most_k, most_q = k.amax(-1).unsqueeze(-2), q.amax(-1, keepdim=True)
        error = error + lost * (has_tiny_q * (most_k + tiny) + has_tiny_k * (most_q + tiny))
    return error


def _flushed(problem: Problem, q: Tensor, k: Tensor, operand: Format, arithmetic: Arithmetic) -> Tensor:
    """Products whose factors are subnormal in the format of the unit, which may take them for 0. Where each
    carries sqrt(scale), that can make it subnormal."""
    tiny = 2.0**operand.min_exponent
    if arithmetic.scale_placement == "operands" and problem.effective_scale:
        tiny /= min(abs(problem.effective_scale) ** 0.5, 1.0)
    lost = torch.zeros((*q.shape[:-1], k.shape[-2]), dtype=q.dtype, device=q.device)
    for left, right in ((torch.where(q < tiny, q, 0.0), k), (q, torch.where(k < tiny, k, 0.0))):
        lost.add_(weighted(problem, left, right.mT))
    return lost


def _storage_error(magnitude: Tensor, arithmetic: Arithmetic) -> Tensor:
    """Rounding of the score tile into ``score_format``; inf where it may overflow."""
    fmt = arithmetic.score_format or FP32
    stored = magnitude * arithmetic.score_scale
    error = half_ulp(stored, fmt) / arithmetic.score_scale
    return torch.where(stored >= fmt.overflow_threshold, torch.inf, error)
