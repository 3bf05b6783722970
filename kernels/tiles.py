"""Where tiles lie in memory, and the scores of one tile: what all kernels do before they part."""

import triton
import triton.language as tl

from kernels.scores import pair_scores


@triton.jit
def rows_from(p, s, i_b, i_h, row):
    """Pointer to row ``row`` of one head of a (batch, heads, length, ..) tensor.

    All three indices are 64-bit before they meet a stride. A tensor that may be absent is the caller's to ask
    for: Triton 3.6 cannot return None.
    """
    return p + i_b * s[0] + i_h * s[1] + row * s[2]


@triton.jit
def pairs_from(p, s, i_b, i_h, q_start, k_start):
    """Pointer to pair (q_start, k_start) of a mask or bias."""
    return p + i_b * s[0] + i_h * s[1] + q_start * s[2] + k_start * s[3]


@triton.jit
def slope_of(p_slopes, s_slopes, i_b, i_h):
    """The head's ALiBi slope in log2 units; 0 without."""
    slope = 0.0
    if p_slopes is not None:
        slope = tl.load(p_slopes + i_b * s_slopes[0] + i_h * s_slopes[1])
    return slope


@triton.jit
def tile_of(p, s_row, s_col, o_row, o_col, m_row, m_col):
    """A tile in either orientation; elements outside read as zero."""
    return tl.load(p + (o_row * s_row + o_col * s_col), mask=m_row & m_col, other=0.0)


@triton.jit
def head_factors(
    sigma, score_factor, p_qf, s_qf, p_kf, s_kf, i_b, i_h, i_hk, PLAIN: tl.constexpr, SCALES: tl.constexpr
):
    """``sigma`` and ``score_factor`` with one head's scales taken out (SCALES = 1).

    sigma stays away from zero, where 0 * inf would be NaN: below 2^-126 every exponent is zero anyway.
    """
    if SCALES == 1:
        q_factor = tl.load(p_qf + i_b * s_qf[0] + i_h * s_qf[1])
        k_factor = tl.load(p_kf + i_b * s_kf[0] + i_hk * s_kf[1])
        # The larger first: a small sigma then keeps a large pair in range, and a large factor a small one.
        larger, smaller = tl.maximum(q_factor, k_factor), tl.minimum(q_factor, k_factor)
        if PLAIN:
            size = tl.maximum(tl.abs(sigma * larger * smaller), 1.1754943508222875e-38)
            sigma = tl.where(sigma < 0, -size, size)
        else:
            score_factor = score_factor * larger * smaller
    return sigma, score_factor


@triton.jit
def tile_scores(
    b_q,
    b_k,
    b_qf,
    b_kf,
    o_i,
    o_j,
    where,
    score_factor,
    cap,
    slope,
    p_mask,
    s_mask,
    p_bias,
    s_bias,
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
    MASKED: tl.constexpr,
    PLAIN: tl.constexpr,
    SOFTCAP: tl.constexpr,
    ALIBI: tl.constexpr,
    SCALES: tl.constexpr,
    PRECISION: tl.constexpr,
    HIDDEN: tl.constexpr,
):
    """Product of two tiles, its scales taken out, and `kernels.scores.pair_scores` of it.

    Args:
        b_q, b_k: the operands, in the order of the product: rows of the tile first.
        b_qf, b_kf: row factors, shaped to broadcast to the tile.
        where: (n_queries, key_limit, shift, left, right, offset) of the batch or segment.
    """
    b_qk = tl.dot(b_q, b_k, input_precision=PRECISION)
    if SCALES == 2:
        b_qk = b_qk * b_qf * b_kf
    return pair_scores(
        b_qk,
        o_i,
        o_j,
        where[0],
        where[1],
        where[2],
        where[3],
        where[4],
        where[5],
        score_factor,
        cap,
        slope,
        p_mask,
        s_mask[2],
        s_mask[3],
        p_bias,
        s_bias[2],
        s_bias[3],
        HAS_LEFT,
        HAS_RIGHT,
        MASKED,
        PLAIN,
        SOFTCAP,
        ALIBI,
        HIDDEN,
    )
