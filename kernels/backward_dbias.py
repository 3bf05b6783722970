"""The gradient of an additive bias, reduced over the dimensions in which the bias is broadcast; no atomics.

One program owns one tile of the bias and adds up every tile of dS that maps to it, in a fixed order and
in fp32, so that nothing larger than the bias is stored. dS is recomputed; it is that of the logits, before
the derivative of a soft cap, as the bias is added after the cap.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gradients import as_gradient_operand, probabilities, score_gradient
from kernels.launch import (
    backward_tile_of,
    device_of,
    gradient_constants,
    pair_arguments,
    pair_constants,
    with_strides,
)
from kernels.masking import segment, tile_range
from kernels.operands import Gradients, Operands
from kernels.options import Options
from kernels.score_path import ScorePath
from kernels.scores import LOG2E
from kernels.tiles import head_factors, pairs_from, rows_from, slope_of, tile_of, tile_scores
from kernels.tuning import Tile


# n_heads, WIDE and DATA_MASK come with what every launch passes; here offsets are 64-bit and all is masked.
@triton.jit(do_not_specialize=["n_tiles_i", "n_tiles_j", "n_loop_b", "n_queries", "n_keys", "left", "right"])
def _dbias_kernel(
    p_q,
    s_q,
    p_k,
    s_k,
    p_v,
    s_v,
    p_do,
    s_do,
    p_lse,
    s_lse,
    p_delta,
    s_delta,
    p_db,
    s_db,
    n_tiles_i,
    n_tiles_j,
    n_bias_heads,
    n_loop_b,
    n_loop_h,
    ROW_BIAS: tl.constexpr,
    KEY_BIAS: tl.constexpr,
    n_heads,  # noqa: ARG001
    group,
    n_queries,
    n_keys,
    factors,
    left,
    right,
    packing,
    pairs,
    scales,
    D: tl.constexpr,  # noqa: ARG001
    DV: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    WIDE: tl.constexpr,  # noqa: ARG001
    BOTTOM_RIGHT: tl.constexpr,
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
    DATA_MASK: tl.constexpr,  # noqa: ARG001
    PLAIN: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SCALES: tl.constexpr,
    PRECISION: tl.constexpr,
    D_SCORE: tl.constexpr,
    SAME: tl.constexpr,  # noqa: ARG001
    GRADIENT: tl.constexpr,
    GRADIENT_PRECISION: tl.constexpr,
):
    sigma, score_factor, cap = factors
    p_key_lengths, p_cu_q, p_cu_k = packing
    p_mask, s_mask, p_bias, s_bias, p_slopes, s_slopes = pairs
    p_qf, s_qf, p_kf, s_kf = scales
    i_tile_j = tl.program_id(0) % n_tiles_j
    i_tile_i = tl.program_id(0) // n_tiles_j % n_tiles_i
    i_hb = tl.program_id(0) // n_tiles_j // n_tiles_i % n_bias_heads
    i_bb = tl.program_id(0) // n_tiles_j // n_tiles_i // n_bias_heads
    o_row = tl.arange(0, BLOCK_M)
    o_col = tl.arange(0, BLOCK_N)
    o_d = tl.arange(0, BLOCK_D)
    o_dv = tl.arange(0, BLOCK_DV)
    b_db = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    for i_loop in tl.range(0, n_loop_b * n_loop_h):
        i_h = tl.cast(i_hb + i_loop % n_loop_h, tl.int64)
        i_b, q_start, k_start, n_q, n_k, key_limit, shift, offset = segment(
            i_bb + i_loop // n_loop_h, n_queries, n_keys, p_key_lengths, p_cu_q, p_cu_k, BOTTOM_RIGHT
        )
        i_hk = i_h // group
        p_q_head = rows_from(p_q, s_q, i_b, i_h, q_start)
        p_k_head = rows_from(p_k, s_k, i_b, i_hk, k_start)
        p_v_head = rows_from(p_v, s_v, i_b, i_hk, k_start)
        p_do_head = rows_from(p_do, s_do, i_b, i_h, q_start)
        p_lse_head = rows_from(p_lse, s_lse, i_b, i_h, q_start)
        p_delta_head = rows_from(p_delta, s_delta, i_b, i_h, q_start)
        p_mask_head = p_mask
        if p_mask is not None:
            p_mask_head = pairs_from(p_mask, s_mask, i_b, i_h, q_start, k_start)
        p_bias_head = p_bias
        if p_bias is not None:
            p_bias_head = pairs_from(p_bias, s_bias, i_b, i_h, q_start, k_start)
        slope = slope_of(p_slopes, s_slopes, i_b, i_h)
        head_sigma, head_factor = head_factors(
            sigma, score_factor, p_qf, s_qf, p_kf, s_kf, i_b, i_h, i_hk, PLAIN, SCALES
        )
        p_qf_head, p_kf_head = p_qf, p_kf
        if SCALES == 2:
            p_qf_head = rows_from(p_qf, s_qf, i_b, i_h, q_start)
            p_kf_head = rows_from(p_kf, s_kf, i_b, i_hk, k_start)
        where = (n_q, key_limit, shift, left, right, offset)
        # A bias with one row gets the sum over all query tiles; one with one column, over all key tiles.
        row_start = i_tile_i * BLOCK_M
        row_stop = tl.minimum(row_start + BLOCK_M, n_q) if ROW_BIAS else n_q
        for i_m in tl.range(row_start, row_stop, BLOCK_M):
            o_i = i_m + o_row
            m_row = o_i < n_q
            o_i64 = o_i.to(tl.int64)
            o_r, m_r = o_i64[:, None], m_row[:, None]
            b_q = tile_of(p_q_head, s_q[2], s_q[3], o_r, o_d[None, :], m_r, o_d[None, :] < D_SCORE)
            b_do = tile_of(p_do_head, s_do[2], s_do[3], o_r, o_dv[None, :], m_r, o_dv[None, :] < DV)
            b_do = as_gradient_operand(b_do, GRADIENT)
            b_qf = 1.0
            if SCALES == 2:
                b_qf = tl.load(p_qf_head + o_i64 * s_qf[2], mask=m_row, other=1.0)[:, None]
            b_lse2 = tl.load(p_lse_head + o_i64 * s_lse[2], mask=m_row, other=0.0) * LOG2E
            b_delta = tl.load(p_delta_head + o_i64 * s_delta[2], mask=m_row, other=0.0)
            last = tl.minimum(i_m + BLOCK_M, n_q) - 1
            key_start, _full_start, _full_stop, key_stop = tile_range(
                i_m, last, key_limit, shift, left, right, HAS_LEFT, HAS_RIGHT, True, BLOCK_N
            )
            if KEY_BIAS:
                key_start = tl.maximum(key_start, i_tile_j * BLOCK_N)
                key_stop = tl.minimum(key_stop, i_tile_j * BLOCK_N + BLOCK_N)
            for i_n in tl.range(key_start, key_stop, BLOCK_N):
                o_j = i_n + o_col
                o_j64 = o_j.to(tl.int64)
                m_col = o_j < key_limit
                o_c, m_c, o_down = o_j64[None, :], m_col[None, :], o_d[:, None]
                b_k = tile_of(p_k_head, s_k[3], s_k[2], o_down, o_c, o_down < D_SCORE, m_c)
                b_v = tile_of(p_v_head, s_v[3], s_v[2], o_dv[:, None], o_c, o_dv[:, None] < DV, m_c)
                b_kf = 1.0
                if SCALES == 2:
                    b_kf = tl.load(p_kf_head + o_j64 * s_kf[2], mask=m_col, other=1.0)[None, :]
                b_s, _b_tanh, m_seen = tile_scores(
                    b_q,
                    b_k,
                    b_qf,
                    b_kf,
                    o_i[:, None],
                    o_j[None, :],
                    where,
                    head_factor,
                    cap,
                    slope,
                    p_mask_head,
                    s_mask,
                    p_bias_head,
                    s_bias,
                    HAS_LEFT,
                    HAS_RIGHT,
                    True,
                    PLAIN,
                    SOFTCAP,
                    p_slopes is not None,
                    SCALES,
                    PRECISION,
                    float("-inf"),
                )
                b_p = probabilities(b_s, head_sigma, b_lse2[:, None], m_seen, True)
                b_dp = tl.dot(b_do, as_gradient_operand(b_v, GRADIENT), input_precision=GRADIENT_PRECISION)
                b_db += score_gradient(b_p, b_dp, b_delta[:, None], m_seen, True)

    # Where the bias has one row (or column) for all, its gradient is the sum; the store goes to one of them.
    _i_b, q_start, k_start, n_q, n_k, _key_limit, _shift, _offset = segment(
        i_bb, n_queries, n_keys, p_key_lengths, p_cu_q, p_cu_k, BOTTOM_RIGHT
    )
    i_out = tl.cast(i_bb, tl.int64)
    if p_cu_q is not None and (ROW_BIAS or KEY_BIAS):
        i_out = i_out * 0
    p_db += i_out * s_db[0] + tl.cast(i_hb, tl.int64) * s_db[1]
    o_i = i_tile_i * BLOCK_M + o_row
    o_j = i_tile_j * BLOCK_N + o_col
    m_i = o_i < n_q
    m_j = o_j < n_k
    if not ROW_BIAS:
        b_db = tl.broadcast_to(tl.sum(b_db, 0)[None, :], [BLOCK_M, BLOCK_N])
        q_start = q_start * 0
        m_i = o_i == 0
    if not KEY_BIAS:
        b_db = tl.broadcast_to(tl.sum(b_db, 1)[:, None], [BLOCK_M, BLOCK_N])
        k_start = k_start * 0
        m_j = o_j == 0
    o_db = (q_start + o_i)[:, None] * s_db[2] + (k_start + o_j)[None, :] * s_db[3]
    tl.store(p_db + o_db, b_db, mask=m_i[:, None] & m_j[None, :])


def launch_dbias(
    gradients: Gradients,
    operands: Operands,
    bias: Tensor,
    options: Options,
    path: ScorePath,
    tile: Tile | None = None,
) -> Tensor:
    """dbias in the shape and dtype of ``bias`` as the caller gave it, broadcast dimensions summed.

    ``tile`` replaces the table's.
    """
    q, k, v, dout = gradients.q, gradients.k, gradients.v, gradients.dout
    packed = options.cu_q is not None
    bias_batch, bias_heads, rows, columns = bias.shape
    row_bias, key_bias = rows > 1, columns > 1
    # Pairs across packed segments have no bias gradient; a bias common to all of them gets one part each.
    parts = options.segments if packed and not (row_bias or key_bias) else bias_batch
    dbias = torch.zeros((parts, bias_heads, rows, columns), dtype=torch.float32, device=q.device)
    if dbias.numel() == 0 or q.numel() == 0 or k.numel() == 0:
        return dbias[:bias_batch].to(bias.dtype)
    if tile is None:
        tile = backward_tile_of("dbias", gradients, operands, options, path)
    tiles_i = triton.cdiv(options.longest_q, tile.block_m) if row_bias else 1
    tiles_j = triton.cdiv(options.longest_k, tile.block_n) if key_bias else 1
    owners = options.segments if packed else bias_batch
    with device_of(q):
        _dbias_kernel[(tiles_i * tiles_j * bias_heads * owners,)](
            *with_strides(operands.q, operands.k, v, dout, gradients.lse, gradients.delta, dbias),
            tiles_i,
            tiles_j,
            bias_heads,
            1 if packed else q.shape[0] // bias_batch,
            q.shape[1] // bias_heads,
            row_bias,
            key_bias,
            *pair_arguments(operands, options),
            **pair_constants(tile, options, path, q, k, v, dout),
            **gradient_constants(gradients, operands, path),
        )
    return (dbias.sum(0, keepdim=True) if parts != bias_batch else dbias).to(bias.dtype)
