"""One step of the online softmax, in base 2.

Logits come as ``x = score * sigma`` (log2 units) and are never stored: the step takes the scores and
the factor. Rounding, per element: ``x - m`` is one fused multiply-add, so a row's terms carry a common
factor 2^delta, where delta is the rounding error of the row's own m = max(score) * sigma. It cancels in
O and in the log-sum-exp. Flash attention, Dao 2023 (arXiv 2307.08691), algorithm 1.
"""

import triton
import triton.language as tl

# The common factor 2^delta, |delta| <= ulp(m)/2, would push fp16 probabilities below their range from
# ulp(m)/2 = 14 on. From 2^27 on rows become NaN, rather than a finite wrong number.
FP16_LARGEST_MAX = tl.constexpr(2.0**27)


@triton.jit
def online_softmax_step(b_s, sigma, m_i, l_i, NEGATIVE: tl.constexpr, PROBABILITY_FP16: tl.constexpr):
    """Fold one tile of scores into the running maximum and row sum.

    Args:
        b_s: [BM, BN] fp32 scores; hidden pairs hold -inf (+inf where sigma is negative).
        sigma: fp32 factor to log2 units; NEGATIVE says its sign. Never zero: a zero times a hidden
            pair's infinity would be NaN.
        m_i, l_i: [BM] running maximum (log2 units) and row sum; -inf and 0 at the start.

    Returns:
        b_p: [BM, BN] fp32 probabilities relative to the new maximum, b_alpha: [BM] factor for what was
        accumulated before, and the new m_i, l_i. NaN scores do not enter the maximum (neither on a GPU
        nor in the interpreter) but do enter b_p, and through it the row.
    """
    b_max = tl.min(b_s, 1) * sigma if NEGATIVE else tl.max(b_s, 1) * sigma
    m_new = tl.maximum(m_i, b_max)
    # A row that has seen nothing yet: exp2(-inf - 0) = 0, where -inf - -inf would be NaN.
    m_base = tl.where(m_new == float("-inf"), 0.0, m_new)
    if PROBABILITY_FP16:
        m_base = tl.where(tl.abs(m_base) >= FP16_LARGEST_MAX, float("nan"), m_base)
    b_p = tl.exp2(tl.fma(b_s, sigma, -m_base[:, None]))
    b_alpha = tl.exp2(m_i - m_base)
    l_i = l_i * b_alpha + tl.sum(b_p, 1)
    return b_p, b_alpha, m_new, l_i
