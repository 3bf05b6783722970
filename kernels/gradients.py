"""Probabilities and the gradient of the scores of one tile of pairs: one place for all backward kernels."""

import triton
import triton.language as tl

from kernels.rounding import nearest_tf32


@triton.jit
def as_gradient_operand(b_x, FORMAT: tl.constexpr):
    """A tile as it was given, for a product of the backward: fp8 widened to bf16, fp32 rounded to TF32."""
    if FORMAT == "bf16":
        b_x = b_x.to(tl.bfloat16)
    if FORMAT == "tf32":
        b_x = nearest_tf32(b_x)
    return b_x


@triton.jit
def probabilities(b_s, sigma, b_lse2, m_seen, MASKED: tl.constexpr):
    """P = exp(s - lse) in fp32, recomputed; ``b_lse2`` is lse * log2 e, shaped to broadcast.

    A row whose log-sum-exp is -inf sees nothing, or overflowed: hidden pairs are zero by the mask, and
    what overflowed is NaN (-inf + inf), as its output was.
    """
    b_p = tl.exp2(tl.fma(b_s, sigma, -b_lse2))
    if MASKED:
        b_p = tl.where(m_seen, b_p, 0.0)
    return b_p


@triton.jit
def score_gradient(b_p, b_dp, b_delta, m_seen, MASKED: tl.constexpr):
    """dS = P * (dP - delta) in fp32, zero for hidden pairs even where dP or delta is not finite."""
    b_ds = b_p * (b_dp - b_delta)
    if MASKED:
        b_ds = tl.where(m_seen, b_ds, 0.0)
    return b_ds


@triton.jit
def through_cap(b_ds, b_tanh, SOFTCAP: tl.constexpr):
    """Gradient before the soft cap: d/dy c tanh(y/c) = 1 - tanh^2(y/c). The bias is added after it."""
    if SOFTCAP:
        b_ds = b_ds * (1.0 - b_tanh * b_tanh)
    return b_ds
