"""From q . k to the logit in log2 units, with everything that may stand between: one place for all passes.

    plain:   x = sigma * s with s = q . k and sigma = scale * log2 e
    else:    x = s with s = cap(q . k * factor) + bias * log2 e - slope * log2 e * |i + Nk - Nq - j|

where cap(y) = y with factor = scale * log2 e, or c log2 e * tanh(y) with factor = scale / c.
"""

import triton
import triton.language as tl

from kernels.masking import band_sees

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def tanh(x):
    """tanh to about 2 ulp in fp32: a polynomial near zero (Cephes, tanhf.c), else 1 - 2/(exp(2|x|) + 1)."""
    square = x * x
    series = -5.70498872745e-3 * square + 2.06390887954e-2
    series = series * square - 5.37397155531e-2
    series = series * square + 1.33314422036e-1
    series = series * square - 3.33332819422e-1
    near = series * square * x + x
    magnitude = tl.abs(x)
    far = 1.0 - 2.0 / (tl.exp2(magnitude * (2.0 * LOG2E)) + 1.0)
    far = tl.where(x < 0, -far, far)
    return tl.where(magnitude < 0.625, near, far)


@triton.jit
def pair_scores(
    b_qk,
    o_i,
    o_j,
    n_queries,
    key_limit,
    shift,
    left,
    right,
    offset,
    score_factor,
    cap,
    slope,
    p_mask,
    stride_mi,
    stride_mj,
    p_bias,
    stride_bi,
    stride_bj,
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
    MASKED: tl.constexpr,
    PLAIN: tl.constexpr,
    SOFTCAP: tl.constexpr,
    ALIBI: tl.constexpr,
    HIDDEN: tl.constexpr,
):
    """Scores of one tile of pairs, and which pairs are seen.

    Args:
        b_qk: fp32 tile of q . k, keys along either axis.
        o_i, o_j: query and key indices, shaped to broadcast to the tile.
        p_mask, p_bias: None, or pointers to pair (0, 0) of this batch, head and segment.
        cap: c * log2 e; slope: slope_h * log2 e.
        HIDDEN: the score of a pair that is not seen, an infinity.

    Returns:
        b_s: scores, to be multiplied by sigma; b_tanh: tanh before the cap (b_qk where there is none);
        m_seen: seen pairs (all true where neither MASKED nor a bias).
    """
    b_s = b_qk
    b_tanh = b_qk
    m_seen = (o_i >= 0) & (o_j >= 0)
    if MASKED:
        m_seen = band_sees(o_i, o_j, n_queries, key_limit, shift, left, right, HAS_LEFT, HAS_RIGHT)
    m_inside = (o_i < n_queries) & (o_j < key_limit)
    if not PLAIN:
        b_s = b_s * score_factor
    if SOFTCAP:
        b_tanh = tanh(b_s)
        b_s = b_tanh * cap
    if p_bias is not None:
        # Tile offsets are 64-bit: a bias is as large as the square of a length.
        o_bias = o_i.to(tl.int64) * stride_bi + o_j.to(tl.int64) * stride_bj
        b_bias = tl.load(p_bias + o_bias, mask=m_inside, other=0.0).to(tl.float32)
        b_s += b_bias * LOG2E
        # A bias of -inf is a mask.
        m_seen = m_seen & (b_bias != float("-inf"))
    if ALIBI:
        b_s -= slope * tl.abs(o_i + offset - o_j).to(tl.float32)
    if p_mask is not None:
        o_mask = o_i.to(tl.int64) * stride_mi + o_j.to(tl.int64) * stride_mj
        m_seen = m_seen & (tl.load(p_mask + o_mask, mask=m_inside, other=0) != 0)
    if MASKED:
        b_s = tl.where(m_seen, b_s, HIDDEN)
    return b_s, b_tanh, m_seen
