"""The gradient of q: one program a tile of queries, over key tiles in ascending order; no atomics.

Scores are recomputed by the forward's score path. Rounding points: P and dP in fp32; dS = P * (dP - delta) in
fp32, rounded to the gradient format (`kernels.score_path`) for the product with k as it was given; fp32
accumulation; dQ is rounded once, after the factor ``scale``.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gradients import as_gradient_operand, probabilities, score_gradient, through_cap
from kernels.launch import (
    backward_tile_of,
    device_of,
    gradient_constants,
    pair_arguments,
    pair_constants,
    with_strides,
)
from kernels.masking import part_of_range, segment, tile_range
from kernels.operands import Gradients, Operands
from kernels.options import Options
from kernels.rounding import to_operand
from kernels.score_path import ScorePath
from kernels.scores import LOG2E
from kernels.tiles import head_factors, pairs_from, rows_from, slope_of, tile_of, tile_scores
from kernels.tuning import Tile


@triton.jit(do_not_specialize=["n_tiles", "n_queries", "n_keys", "left", "right"])
def _dq_kernel(
    p_q,
    s_q,
    p_k,
    s_k,
    p_gk,
    s_gk,
    p_v,
    s_v,
    p_do,
    s_do,
    p_lse,
    s_lse,
    p_delta,
    s_delta,
    p_dq,
    s_dq,
    scale,
    n_tiles,
    n_heads,
    group,
    n_queries,
    n_keys,
    sigma,
    score_factor,
    cap,
    left,
    right,
    p_key_lengths,
    p_cu_q,
    p_cu_k,
    p_mask,
    s_mask,
    p_bias,
    s_bias,
    p_slopes,
    s_slopes,
    p_qf,
    s_qf,
    p_kf,
    s_kf,
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
    D_SCORE: tl.constexpr,
    SAME: tl.constexpr,
    GRADIENT: tl.constexpr,
    GRADIENT_PRECISION: tl.constexpr,
):
    i_t = n_tiles - 1 - tl.program_id(0) % n_tiles
    i_bh = tl.program_id(0) // n_tiles
    i_h = (i_bh % n_heads).to(tl.int64)
    i_b, q_start, k_start, n_queries, n_keys, key_limit, shift, offset = segment(
        i_bh // n_heads, n_queries, n_keys, p_key_lengths, p_cu_q, p_cu_k, BOTTOM_RIGHT
    )
    i_m = i_t * BLOCK_M
    if i_m >= n_queries:
        return

    i_hk = i_h // group
    p_q = rows_from(p_q, s_q, i_b, i_h, q_start + i_m)
    p_k = rows_from(p_k, s_k, i_b, i_hk, k_start)
    if p_gk is not None:
        p_gk = rows_from(p_gk, s_gk, i_b, i_hk, k_start)
    p_v = rows_from(p_v, s_v, i_b, i_hk, k_start)
    p_do = rows_from(p_do, s_do, i_b, i_h, q_start + i_m)
    p_lse = rows_from(p_lse, s_lse, i_b, i_h, q_start + i_m)
    p_delta = rows_from(p_delta, s_delta, i_b, i_h, q_start + i_m)
    p_dq = rows_from(p_dq, s_dq, i_b, i_h, q_start + i_m)
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
    b_q = tile_of(p_q, s_q[2], s_q[3], o_row[:, None], o_d[None, :], m_row[:, None], o_d[None, :] < D_SCORE)
    b_do = tile_of(p_do, s_do[2], s_do[3], o_row[:, None], o_dv[None, :], m_row[:, None], o_dv[None, :] < DV)
    b_do = as_gradient_operand(b_do, GRADIENT)
    b_lse2 = tl.load(p_lse + o_row * s_lse[2], mask=m_row, other=0.0) * LOG2E
    b_delta = tl.load(p_delta + o_row * s_delta[2], mask=m_row, other=0.0)
    b_qf = 1.0
    if SCALES == 2:
        p_qf = rows_from(p_qf, s_qf, i_b, i_h, q_start + i_m)
        p_kf = rows_from(p_kf, s_kf, i_b, i_hk, k_start)
        b_qf = tl.load(p_qf + o_row * s_qf[2], mask=m_row, other=1.0)[:, None]

    b_dq = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
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
    for i_part in tl.static_range(2 if DATA_MASK else (0 if HAS_LEFT else 1), 3):
        part_start, part_stop = part_of_range(i_part, start, full_start, full_stop, stop)
        for i_n in tl.range(part_start, part_stop, BLOCK_N):
            o_j = i_n + o_n
            i_row = tl.cast(i_n, tl.int64)
            m_key = o_j < key_limit if i_part != 1 else o_j >= 0
            o_k, o_down = o_col[None, :], o_d[:, None]
            b_k = tile_of(p_k + i_row * s_k[2], s_k[3], s_k[2], o_down, o_k, o_down < D_SCORE, m_key[None, :])
            b_v = tile_of(
                p_v + i_row * s_v[2], s_v[3], s_v[2], o_dv[:, None], o_k, o_dv[:, None] < DV, m_key[None, :]
            )
            b_kf = 1.0
            if SCALES == 2:
                b_kf = tl.load(p_kf + i_row * s_kf[2] + o_col * s_kf[2], mask=m_key, other=1.0)[None, :]
            b_s, b_tanh, m_seen = tile_scores(
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
                float("-inf"),
            )  # [BM, BN]
            b_p = probabilities(b_s, sigma, b_lse2[:, None], m_seen, i_part != 1)
            b_dp = tl.dot(b_do, as_gradient_operand(b_v, GRADIENT), input_precision=GRADIENT_PRECISION)
            b_ds = score_gradient(b_p, b_dp, b_delta[:, None], m_seen, i_part != 1)
            b_ds = to_operand(through_cap(b_ds, b_tanh, SOFTCAP), GRADIENT)
            if not SAME:
                b_k = tile_of(
                    p_gk + i_row * s_gk[2], s_gk[3], s_gk[2], o_down, o_k, o_down < D, m_key[None, :]
                )
            b_k = as_gradient_operand(b_k, GRADIENT)
            b_dq = tl.dot(b_ds, tl.trans(b_k), b_dq, input_precision=GRADIENT_PRECISION)

    tl.store(
        p_dq + o_row[:, None] * s_dq[2] + o_d[None, :] * s_dq[3],
        (b_dq * scale).to(p_dq.dtype.element_ty),
        mask=m_row[:, None] & (o_d[None, :] < D),
    )


def launch_dq(
    gradients: Gradients, operands: Operands, options: Options, path: ScorePath, tile: Tile | None = None
) -> Tensor:
    """dQ in q's shape, in the dtype of the output; ``tile`` replaces the table's."""
    q, k, v, dout = gradients.q, gradients.k, gradients.v, gradients.dout
    dq = torch.empty(q.shape, dtype=path.output, device=q.device)
    if dq.numel() == 0:
        return dq
    if tile is None:
        tile = backward_tile_of("dq", gradients, operands, options, path)
    num_tiles = triton.cdiv(options.longest_q, tile.block_m)
    with device_of(q):
        _dq_kernel[(num_tiles * options.segments * q.shape[1],)](
            *with_strides(operands.q, operands.k, k, v, dout, gradients.lse, gradients.delta, dq),
            options.scale,
            num_tiles,
            *pair_arguments(operands, options),
            **pair_constants(tile, options, path, q, k, v, dout, dq, operands.q, operands.k),
            **gradient_constants(gradients, operands, path),
        )
    return dq
