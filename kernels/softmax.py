"""One step of the online softmax, in base 2. Flash attention, Dao 2023 (arXiv 2307.08691), algorithm 1.

Logits are ``x = score * sigma`` (log2 units); the step takes the scores and the factor. Two forms:

* fused (bf16, fp32): ``fma(score, sigma, -m)`` with m = max(score) * sigma, rounded. A row's terms carry a
  common factor 2^delta, where delta is the rounding error of the row's m; it cancels in O and in the
  log-sum-exp, as long as P can hold it.
* subtract first (fp16): ``(score - m) * sigma`` with m = max(score). Past m = 2^27 the common factor of the
  fused form would leave fp16's range, and a row of zeros come out; here there is none, for one more
  instruction an element.

P's scale for fp8 is a product of its own, but in the fused form it may come with the maximum: under ``LIFT``
m is max(score) * sigma - LIFT, so that weights are 2^LIFT times as large and nothing is multiplied, as in the
fp8 forward of flash attention 3 (Shah et al. 2024, arXiv 2407.08608). Whatever is relative to m, the
log-sum-exp and a sink included, needs no other change.
"""

import triton
import triton.language as tl


@triton.jit
def softmax_start(BLOCK_M: tl.constexpr, NEGATIVE: tl.constexpr, SUBTRACT_FIRST: tl.constexpr):
    """Running maximum (of scores where SUBTRACT_FIRST, else of logits) and row sum before any key."""
    nothing = float("inf") if SUBTRACT_FIRST and NEGATIVE else float("-inf")
    return tl.full([BLOCK_M], nothing, dtype=tl.float32), tl.zeros([BLOCK_M], dtype=tl.float32)


@triton.jit
def online_softmax_step(
    b_s, sigma, m_i, l_i, NEGATIVE: tl.constexpr, SUBTRACT_FIRST: tl.constexpr, LIFT: tl.constexpr = 0.0
):
    """Fold one tile of scores into the running maximum and row sum.

    Args:
        b_s: [BM, BN] fp32 scores; hidden pairs hold -inf (+inf where sigma is negative).
        sigma: fp32 factor to log2 units; NEGATIVE says its sign. Never zero: a zero times a hidden
            pair's infinity would be NaN.
        m_i, l_i: [BM] as `softmax_start` and this function return them.
        LIFT: log2 of the factor on the probabilities, 0 where SUBTRACT_FIRST.

    Returns:
        b_p: [BM, BN] fp32 probabilities relative to the new maximum, times 2^LIFT, b_alpha: [BM] factor for
        what was accumulated before, and the new m_i, l_i. NaN scores do not enter the maximum (neither on a
        GPU nor in the interpreter) but do enter b_p, and through it the row.
    """
    b_top = tl.min(b_s, 1) if NEGATIVE else tl.max(b_s, 1)
    # The base of a row that has seen nothing yet is 0: exp2(-inf - 0) = 0, where -inf - -inf is NaN.
    if SUBTRACT_FIRST:
        m_new = tl.minimum(m_i, b_top) if NEGATIVE else tl.maximum(m_i, b_top)
        m_base = tl.where(m_new == (float("inf") if NEGATIVE else float("-inf")), 0.0, m_new)
        b_p = tl.exp2((b_s - m_base[:, None]) * sigma)
        b_alpha = tl.exp2((m_i - m_base) * sigma)
    else:
        m_new = tl.maximum(m_i, b_top * sigma if LIFT == 0.0 else tl.fma(b_top, sigma, -LIFT))
        m_base = tl.where(m_new == float("-inf"), 0.0, m_new)
        b_p = tl.exp2(tl.fma(b_s, sigma, -m_base[:, None]))
        b_alpha = tl.exp2(m_i - m_base)
    l_i = l_i * b_alpha + tl.sum(b_p, 1)
    return b_p, b_alpha, m_new, l_i


@triton.jit
def softmax_output(b_acc, l_i, P_SCALE: tl.constexpr):
    """What was accumulated over the row sum: one division a row, and a product an element."""
    b_inverse = 1.0 / l_i
    if P_SCALE != 1.0:
        b_inverse = b_inverse * (1.0 / P_SCALE)
    return b_acc * b_inverse[:, None]


@triton.jit
def maximum_in_log2(m_i, sigma, SUBTRACT_FIRST: tl.constexpr):
    """The running maximum as a logit in log2 units."""
    return m_i * sigma if SUBTRACT_FIRST else m_i


@triton.jit
def relative_weight(x, base):
    """2^(x - base) for x <= base, in log2 units: exactly 1 where x is the base.

    The difference alone is not 0 there where x is a product: a compiler fuses a product into the subtraction,
    and what is left is the rounding error of the base, 2^-24 of it. Past 2^31 that is a weight of 0 or inf.
    """
    return tl.where(x == base, 1.0, tl.exp2(x - base))
