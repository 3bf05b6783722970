"""How far a computed score can be from the exact one: THEORY.md section 3.1 and 3.2."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flashcheck.arithmetic import Accumulator, Arithmetic, Machine
from flashcheck.bounds.numbers import FP32_MAX, SMALLEST_FP32, SMALLEST_NORMAL_FP32, UNIT
from flashcheck.formats import FP32, Format, half_ulp
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
        overflow: boolean (B, H, Nq): rows in which a score may leave the range of fp32, or of
            the format in which it is stored.
    """

    own: Tensor
    constant: float
    additive: bool
    overflow: Tensor


def score_error(
    problem: Problem, exact: ForwardQuantities, arithmetic: Arithmetic, machine: Machine
) -> ScoreError:
    """Terms [S1] to [S8] of THEORY.md: everything up to and including the score in fp32."""
    visible = exact.visible
    scale = abs(problem.effective_scale)
    q = problem.q.double().abs()
    k = problem.k.double().abs().repeat_interleave(problem.group, 1)
    magnitude = torch.where(visible, q @ k.transpose(-1, -2), 0.0)
    operand = arithmetic.product_format or arithmetic.input_format
    unit = machine.accumulator(operand)
    dot = _product_error(magnitude, q, k, operand, unit)  # [S1]
    overflow = magnitude * (1 + unit.gamma(problem.head_dim)) >= FP32_MAX
    if arithmetic.score_format is not None:  # [S2]
        dot = dot + _storage_error(magnitude + dot, arithmetic)
        overflow = overflow | dot.isinf()  # also where the scale is 0: 0 * inf is NaN
    own = scale * dot
    if arithmetic.scale_placement == "operands":  # [S3]
        operand_unit = max(UNIT, 0.0 if arithmetic.product_format is None else operand.unit_roundoff)
        own = own * (1 + 4 * operand_unit) + 2 * operand_unit * (1 + operand_unit) * scale * magnitude
        floor = SMALLEST_FP32 * scale**0.5 * problem.head_dim
        own = own + floor * (q.amax(-1, keepdim=True) + k.amax(-1).unsqueeze(-2))
    constant = arithmetic.scale_roundings * UNIT
    products = torch.where(visible, exact.products.abs(), 0.0)
    finite = torch.where(visible, exact.scores.abs(), 0.0)
    rounded_scores = arithmetic.scale_placement == "scores" or (
        arithmetic.scale_placement == "exponent_fma" and not machine.fused_multiply_add
    )
    if rounded_scores:  # [S4]
        own = own * (1 + UNIT) + UNIT * products
    additive = problem.bias is not None or problem.alibi_slopes is not None or problem.softcap is not None
    if problem.softcap is not None:  # [S5]
        reach = torch.minimum(products, torch.full_like(products, 0.4478 * problem.softcap))
        own = own + 3 * UNIT * reach + (machine.tanh_error + UNIT) * problem.softcap
        products = torch.minimum(products, torch.full_like(products, problem.softcap))
    if additive:  # [S6]
        added = finite + products  # >= |bias + alibi|
        own = own + UNIT * (3 * added + 2 * finite) + constant * products
    if arithmetic.score_roundings:  # [S7]
        own = own + arithmetic.score_roundings * UNIT * (finite + own)
    if (fmt := arithmetic.scaled_score_format) is not None:  # [S8]
        reach = finite + own
        own = own + torch.where(reach >= fmt.overflow_threshold, torch.inf, half_ulp(reach, fmt))
    own = torch.where(visible, own, 0.0)
    rows = (visible & (own.isinf() | overflow | (scale * magnitude >= FP32_MAX) | (finite >= FP32_MAX))).any(
        -1
    )
    own = torch.where(visible & overflow, torch.inf, own)
    return ScoreError(own, constant, additive, rows)


def _product_error(magnitude: Tensor, q: Tensor, k: Tensor, operand: Format, unit: Accumulator) -> Tensor:
    """|computed q.k - q.k| for any order of summation: gamma(d) |q|.|k| and the absolute floors."""
    dim = q.shape[-1]
    error = unit.gamma(dim) * magnitude + dim * SMALLEST_FP32
    if unit.flush_subnormals:
        tiny = SMALLEST_NORMAL_FP32
        error = error + dim * tiny * (q.amax(-1, keepdim=True) + k.amax(-1).unsqueeze(-2) + 1.0)
    if unit.fraction_bits is not None:
        # A subnormal operand is aligned as if it had the exponent emin (THEORY.md 2.3).
        tiny = 2.0**operand.min_exponent
        steps = -(-dim // unit.block)
        lost = steps * (unit.block + 1) * 2.0**-unit.fraction_bits * tiny
        has_tiny_q = ((q > 0) & (q < tiny)).any(-1, keepdim=True)
        has_tiny_k = ((k > 0) & (k < tiny)).any(-1).unsqueeze(-2)
        most_k, most_q = k.amax(-1).unsqueeze(-2), q.amax(-1, keepdim=True)
        error = error + lost * (has_tiny_q * (most_k + tiny) + has_tiny_k * (most_q + tiny))
    return error


def _storage_error(magnitude: Tensor, arithmetic: Arithmetic) -> Tensor:
    """Rounding of the score tile into ``score_format``; inf where it may overflow."""
    fmt = arithmetic.score_format or FP32
    stored = magnitude * arithmetic.score_scale
    error = half_ulp(stored, fmt) / arithmetic.score_scale
    return torch.where(stored >= fmt.overflow_threshold, torch.inf, error)
