"""The forward pass: O and the natural log-sum-exp, one program a tile of queries.

Rounding points, per element: scores accumulate in fp32; ``exp2`` of the logit less the running maximum
(`kernels.softmax` has the two forms of that difference); the row sum adds unrounded fp32 probabilities;
probabilities, times a power of two where they are fp8, are rounded to the score path's format for the product
with v, which accumulates in fp32 and is rescaled at every tile; O is rounded once, at the end. fp32 inputs
multiply in IEEE fp32 unless the caller asks for less.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.hopper.calls import packed, simple
from kernels.launch import device_of, pair_arguments, pair_constants, softmax_constants, with_strides
from kernels.masking import part_of_range, row_sees_any, segment, tile_range
from kernels.operands import Operands
from kernels.options import Options
from kernels.rounding import to_operand
from kernels.score_path import ScorePath
from kernels.scores import LOG2E
from kernels.softmax import (
    maximum_in_log2,
    online_softmax_step,
    relative_weight,
    softmax_output,
    softmax_start,
)
from kernels.tiles import head_factors, pairs_from, rows_from, slope_of, tile_of, tile_scores
from kernels.tuning import Tile, forward_tile, mean_length

LN2 = tl.constexpr(0.6931471805599453)


# Lengths and mask bounds take any value from call to call: no recompilation where one is 1 or divisible
# by 16.
@triton.jit(do_not_specialize=["n_tiles", "n_queries", "n_keys", "left", "right"])
def _forward_kernel(
    p_q,
    s_q,
    p_k,
    s_k,
    p_v,
    s_v,
    p_o,
    s_o,
    p_lse,
    s_lse,
    n_tiles,
    p_sink,
    p_vf,
    s_vf,
    n_heads,
    group,
    n_queries,
    n_keys,
    factors,
    left,
    right,
    packing,
    pairs,
    scales,
    D: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    WIDE: tl.constexpr,
    BOTTOM_RIGHT: tl.constexpr,
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
    DATA_MASK: tl.constexpr,
    PLAIN: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SCALES: tl.constexpr,
    PRECISION: tl.constexpr,
    NEGATIVE: tl.constexpr,
    SUBTRACT_FIRST: tl.constexpr,
    FORMAT: tl.constexpr,
    P_SCALE: tl.constexpr,
    LIFT: tl.constexpr,
    PROMOTE: tl.constexpr,
):
    sigma, score_factor, cap = factors
    p_key_lengths, p_cu_q, p_cu_k = packing
    p_mask, s_mask, p_bias, s_bias, p_slopes, s_slopes = pairs
    p_qf, s_qf, p_kf, s_kf = scales
    # The last rows see the most keys under a causal mask: they start first.
    i_t = n_tiles - 1 - tl.program_id(0) % n_tiles
    i_bh = tl.program_id(0) // n_tiles
    i_h = (i_bh % n_heads).to(tl.int64)
    i_b, q_start, k_start, n_queries, n_keys, key_limit, shift, offset = segment(
        i_bh // n_heads, n_queries, n_keys, p_key_lengths, p_cu_q, p_cu_k, BOTTOM_RIGHT
    )
    i_m = i_t * BLOCK_M
    if i_m >= n_queries:
        return

    # Tile starts are 64-bit before any multiplication; offsets inside a tile are too where WIDE.
    i_hk = i_h // group
    p_q = rows_from(p_q, s_q, i_b, i_h, q_start + i_m)
    p_k = rows_from(p_k, s_k, i_b, i_hk, k_start)
    p_v = rows_from(p_v, s_v, i_b, i_hk, k_start)
    p_o = rows_from(p_o, s_o, i_b, i_h, q_start + i_m)
    p_lse = rows_from(p_lse, s_lse, i_b, i_h, q_start + i_m)
    if p_mask is not None:
        p_mask = pairs_from(p_mask, s_mask, i_b, i_h, q_start, k_start)
    if p_bias is not None:
        p_bias = pairs_from(p_bias, s_bias, i_b, i_h, q_start, k_start)
    slope = slope_of(p_slopes, s_slopes, i_b, i_h)
    sigma, score_factor = head_factors(
        sigma, score_factor, p_qf, s_qf, p_kf, s_kf, i_b, i_h, i_hk, PLAIN, SCALES
    )
    where = (n_queries, key_limit, shift, left, right, offset)

    o_d = tl.arange(0, BLOCK_D)
    o_dv = tl.arange(0, BLOCK_DV)
    o_n = tl.arange(0, BLOCK_N)
    o_row = tl.arange(0, BLOCK_M)
    o_m = i_m + o_row
    m_row = o_m < n_queries
    o_row = o_row.to(tl.int64) if WIDE else o_row
    o_col = o_n.to(tl.int64) if WIDE else o_n
    b_q = tile_of(p_q, s_q[2], s_q[3], o_row[:, None], o_d[None, :], m_row[:, None], o_d[None, :] < D)
    b_qf = 1.0
    if SCALES == 2:
        p_qf = rows_from(p_qf, s_qf, i_b, i_h, q_start + i_m)
        p_kf = rows_from(p_kf, s_kf, i_b, i_hk, k_start)
        b_qf = tl.load(p_qf + o_row * s_qf[2], mask=m_row, other=1.0)[:, None]

    b_acc = tl.zeros([BLOCK_M, BLOCK_DV], dtype=tl.float32)
    m_i, l_i = softmax_start(BLOCK_M, NEGATIVE, SUBTRACT_FIRST)
    b_seen = tl.zeros([BLOCK_M], dtype=tl.int32)
    start, full_start, full_stop, stop = tile_range(
        i_m,
        tl.minimum(i_m + BLOCK_M, n_queries) - 1,
        key_limit,
        shift,
        left,
        right,
        HAS_LEFT,
        HAS_RIGHT,
        DATA_MASK,
        BLOCK_N,
    )
    # Keys left of the full tiles, the full tiles, and keys right of them. Only a window has the first;
    # where contents decide, all is in the last.
    for i_part in tl.static_range(2 if DATA_MASK else (0 if HAS_LEFT else 1), 3):
        part_start, part_stop = part_of_range(i_part, start, full_start, full_stop, stop)
        for i_n in tl.range(part_start, part_stop, BLOCK_N):
            o_j = i_n + o_n
            i_row = tl.cast(i_n, tl.int64)
            # Columns past the head dim and keys past the end read as zero; a full tile has none of these.
            m_key = o_j < key_limit if i_part != 1 else o_j >= 0
            b_k = tile_of(
                p_k + i_row * s_k[2],
                s_k[3],
                s_k[2],
                o_d[:, None],
                o_col[None, :],
                o_d[:, None] < D,
                m_key[None, :],
            )  # [BD, BN]
            b_kf = 1.0
            if SCALES == 2:
                b_kf = tl.load(p_kf + i_row * s_kf[2] + o_col * s_kf[2], mask=m_key, other=1.0)[None, :]
            b_s, _, m_seen = tile_scores(
                b_q,
                b_k,
                b_qf,
                b_kf,
                o_m[:, None],
                o_j[None, :],
                where,
                score_factor,
                cap,
                slope,
                p_mask,
                s_mask,
                p_bias,
                s_bias,
                HAS_LEFT,
                HAS_RIGHT,
                i_part != 1,
                PLAIN,
                SOFTCAP,
                p_slopes is not None,
                SCALES,
                PRECISION,
                float("inf") if NEGATIVE else float("-inf"),
            )  # [BM, BN]
            if DATA_MASK:
                b_seen = tl.maximum(b_seen, tl.max(m_seen.to(tl.int32), 1))
            b_p, b_alpha, m_i, l_i = online_softmax_step(b_s, sigma, m_i, l_i, NEGATIVE, SUBTRACT_FIRST, LIFT)
            b_v = tile_of(
                p_v + i_row * s_v[2],
                s_v[2],
                s_v[3],
                o_col[:, None],
                o_dv[None, :],
                m_key[:, None],
                o_dv[None, :] < DV,
            )  # [BN, BDV]
            b_acc = b_acc * b_alpha[:, None]
            b_p = to_operand(b_p if P_SCALE == 1.0 else b_p * P_SCALE, FORMAT)
            if PROMOTE:
                # The sum over a tile starts from zero in the matrix unit; fp32 adds it to the rest.
                b_acc += tl.dot(b_p, b_v, input_precision=PRECISION)
            else:
                b_acc = tl.dot(b_p, b_v, b_acc, input_precision=PRECISION)

    # Whether a row sees a key is asked of the mask, not of m_i or l_i: scores that overflowed to -inf
    # leave those looking empty, and must give NaN (0/0 below), not a finite row of zeros.
    m_any = b_seen > 0 if DATA_MASK else row_sees_any(o_m, key_limit, shift, left, right, HAS_LEFT, HAS_RIGHT)
    m_i = maximum_in_log2(m_i, sigma, SUBTRACT_FIRST)
    sink = float("-inf")
    if p_sink is not None:
        # One more key, whose value is zero; it is all there is to the log-sum-exp of an empty row.
        sink = tl.load(p_sink + i_h)
        m_new = tl.maximum(m_i, sink * LOG2E)
        m_base = tl.where(m_new == float("-inf"), 0.0, m_new)
        b_alpha = relative_weight(m_i, m_base)
        b_acc = b_acc * b_alpha[:, None]
        l_i = l_i * b_alpha + relative_weight(sink * LOG2E, m_base)
        m_i = m_new
    b_lse = tl.where(m_any, (m_i + tl.log2(l_i)) * LN2, sink)
    b_o = softmax_output(b_acc, l_i, P_SCALE)
    if p_vf is not None:
        b_o = b_o * tl.load(p_vf + i_b * s_vf[0] + i_hk * s_vf[1])
    b_o = tl.where(m_any[:, None], b_o, 0.0)
    tl.store(
        p_o + o_row[:, None] * s_o[2] + o_dv[None, :] * s_o[3],
        b_o.to(p_o.dtype.element_ty),
        mask=m_row[:, None] & (o_dv[None, :] < DV),
    )
    tl.store(p_lse + o_row * s_lse[2], b_lse, mask=m_row)


def launch_forward(
    operands: Operands, options: Options, path: ScorePath, tile: Tile | None = None
) -> tuple[Tensor, Tensor]:
    """O (batch, heads, Nq, value dim) and the natural log-sum-exp (batch, heads, Nq) in fp32.

    ``tile`` replaces the table's.
    """
    q, k, v = operands.q, operands.k, operands.v
    batch, heads, num_queries, head_dim = q.shape
    value_dim = v.shape[3]
    out = torch.empty((batch, heads, num_queries, value_dim), dtype=path.output, device=v.device)
    lse = torch.empty((batch, heads, num_queries), dtype=torch.float32, device=q.device)
    if lse.numel() == 0:
        return out, lse
    if tile is None:
        sizes = (head_dim, value_dim, options.longest_q, options.longest_k)
        alone = packed(options) and not path.converts
        tile = forward_tile(
            q.device.type,
            q.element_size(),
            *sizes,
            data_mask=options.data_mask,
            simple=simple(options) and not path.converts,
            packed=mean_length(k.shape[2], options.segments) if alone else None,
        )
    num_tiles = triton.cdiv(options.longest_q, tile.block_m)
    v_factor = operands.v_factor
    with device_of(q):
        _forward_kernel[(num_tiles * options.segments * heads,)](
            *with_strides(q, k, v, out, lse),
            num_tiles,
            options.sink,
            *with_strides(v_factor),
            *pair_arguments(operands, options),
            NEGATIVE=options.sigma < 0,
            FORMAT=path.operand,
            PROMOTE=path.promote,
            **softmax_constants(path, head_dim, options.plain_sigma),
            **pair_constants(tile, options, path, q, k, v, out),
        )
    return out, lse
