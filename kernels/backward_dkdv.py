"""The gradients of k and v: one program a tile of keys, over the group's heads and query tiles; no atomics.

Tiles are transposed (keys down, queries across), so that P^T and dS^T enter their products as they are.
Rounding points: P and dS in fp32, rounded to the gradient format (`kernels.score_path`) for dV and dK; both
sums run in fp32 over heads and query tiles in ascending order, and are rounded once.
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
def _dkdv_kernel(
    p_q,
    s_q,
    p_gq,
    s_gq,
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
    p_dk,
    s_dk,
    p_dv,
    s_dv,
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
    i_bh = tl.program_id(0) // n_tiles
    n_kv_heads = n_heads // group
    i_hk = (i_bh % n_kv_heads).to(tl.int64)
    i_b, q_start, k_start, n_queries, n_keys, key_limit, shift, offset = segment(
        i_bh // n_kv_heads, n_queries, n_keys, p_key_lengths, p_cu_q, p_cu_k, BOTTOM_RIGHT
    )
    i_n = tl.program_id(0) % n_tiles * BLOCK_N
    if i_n >= n_keys:
        return

    p_k = rows_from(p_k, s_k, i_b, i_hk, k_start + i_n)
    p_v = rows_from(p_v, s_v, i_b, i_hk, k_start + i_n)
    p_dk = rows_from(p_dk, s_dk, i_b, i_hk, k_start + i_n)
    p_dv = rows_from(p_dv, s_dv, i_b, i_hk, k_start + i_n)
    o_d = tl.arange(0, BLOCK_D)
    o_dv = tl.arange(0, BLOCK_DV)
    o_m = tl.arange(0, BLOCK_M)
    o_row = tl.arange(0, BLOCK_N)
    o_j = i_n + o_row
    o_row = o_row.to(tl.int64) if WIDE else o_row
    o_col = o_m.to(tl.int64) if WIDE else o_m
    # Padding past key_limit may hold anything, and is not read; its gradients are zero.
    m_read = (o_j < key_limit)[:, None]
    m_write = (o_j < n_keys)[:, None]
    b_k = tile_of(p_k, s_k[2], s_k[3], o_row[:, None], o_d[None, :], m_read, o_d[None, :] < D_SCORE)
    b_v = tile_of(p_v, s_v[2], s_v[3], o_row[:, None], o_dv[None, :], m_read, o_dv[None, :] < DV)
    b_v = as_gradient_operand(b_v, GRADIENT)
    b_kf = 1.0
    if SCALES == 2:
        p_kf_tile = rows_from(p_kf, s_kf, i_b, i_hk, k_start + i_n)
        b_kf = tl.load(p_kf_tile + o_row * s_kf[2], mask=o_j < key_limit, other=1.0)[:, None]
    where = (n_queries, key_limit, shift, left, right, offset)

    b_dk = tl.zeros([BLOCK_N, BLOCK_D], dtype=tl.float32)
    b_dv = tl.zeros([BLOCK_N, BLOCK_DV], dtype=tl.float32)
    last = tl.minimum(i_n + BLOCK_N, n_keys) - 1
    start, full_start, full_stop, stop = tile_range(
        i_n, last, n_queries, -shift, right, left, HAS_RIGHT, HAS_LEFT, DATA_MASK, BLOCK_M
    )
    # A tile with padding is masked everywhere; one of padding alone meets no query.
    ragged = i_n + BLOCK_N > key_limit
    full_start = tl.where(ragged, start, full_start)
    full_stop = tl.where(ragged, start, full_stop)
    stop = tl.where(i_n >= key_limit, start, stop)
    for i_g in tl.range(0, group):
        i_h = i_hk * group + i_g
        p_q_head = rows_from(p_q, s_q, i_b, i_h, q_start)
        p_gq_head = p_gq
        if p_gq is not None:
            p_gq_head = rows_from(p_gq, s_gq, i_b, i_h, q_start)
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
        p_qf_head = p_qf
        if SCALES == 2:
            p_qf_head = rows_from(p_qf, s_qf, i_b, i_h, q_start)
        # Queries above the full tiles, the full tiles, and queries below them; only causality has the first.
        for i_part in tl.static_range(2 if DATA_MASK else (0 if HAS_RIGHT else 1), 3):
            part_start, part_stop = part_of_range(i_part, start, full_start, full_stop, stop)
            for i_m in tl.range(part_start, part_stop, BLOCK_M):
                o_i = i_m + o_m
                m_row = o_i < n_queries
                i_row = tl.cast(i_m, tl.int64)
                m_in = m_row if i_part != 1 else o_i >= 0
                o_q, o_down = o_col[None, :], o_d[:, None]
                b_q = tile_of(
                    p_q_head + i_row * s_q[2], s_q[3], s_q[2], o_down, o_q, o_down < D_SCORE, m_in[None, :]
                )  # [BD, BM]
                b_do = tile_of(
                    p_do_head + i_row * s_do[2],
                    s_do[2],
                    s_do[3],
                    o_col[:, None],
                    o_dv[None, :],
                    m_in[:, None],
                    o_dv[None, :] < DV,
                )  # [BM, BDV]
                b_do = as_gradient_operand(b_do, GRADIENT)
                b_lse2 = (
                    tl.load(p_lse_head + i_row * s_lse[2] + o_col * s_lse[2], mask=m_row, other=0.0) * LOG2E
                )
                b_delta = tl.load(
                    p_delta_head + i_row * s_delta[2] + o_col * s_delta[2], mask=m_row, other=0.0
                )
                b_qf = 1.0
                if SCALES == 2:
                    b_qf = tl.load(p_qf_head + i_row * s_qf[2] + o_col * s_qf[2], mask=m_row, other=1.0)[
                        None, :
                    ]
                b_s, b_tanh, m_seen = tile_scores(
                    b_k,
                    b_q,
                    b_kf,
                    b_qf,
                    o_i[None, :],
                    o_j[:, None],
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
                    i_part != 1,
                    PLAIN,
                    SOFTCAP,
                    p_slopes is not None,
                    SCALES,
                    PRECISION,
                    float("-inf"),
                )  # [BN, BM]
                b_p = probabilities(b_s, head_sigma, b_lse2[None, :], m_seen, i_part != 1)
                b_dv = tl.dot(to_operand(b_p, GRADIENT), b_do, b_dv, input_precision=GRADIENT_PRECISION)
                b_dp = tl.dot(b_v, tl.trans(b_do), input_precision=GRADIENT_PRECISION)
                b_ds = score_gradient(b_p, b_dp, b_delta[None, :], m_seen, i_part != 1)
                b_ds = to_operand(through_cap(b_ds, b_tanh, SOFTCAP), GRADIENT)
                if not SAME:
                    b_q = tile_of(
                        p_gq_head + i_row * s_gq[2], s_gq[3], s_gq[2], o_down, o_q, o_down < D, m_in[None, :]
                    )
                b_q = as_gradient_operand(b_q, GRADIENT)
                b_dk = tl.dot(b_ds, tl.trans(b_q), b_dk, input_precision=GRADIENT_PRECISION)

    tl.store(
        p_dk + o_row[:, None] * s_dk[2] + o_d[None, :] * s_dk[3],
        (b_dk * scale).to(p_dk.dtype.element_ty),
        mask=m_write & (o_d[None, :] < D),
    )
    tl.store(
        p_dv + o_row[:, None] * s_dv[2] + o_dv[None, :] * s_dv[3],
        b_dv.to(p_dv.dtype.element_ty),
        mask=m_write & (o_dv[None, :] < DV),
    )


def launch_dkdv(
    gradients: Gradients, operands: Operands, options: Options, path: ScorePath, tile: Tile | None = None
) -> tuple[Tensor, Tensor]:
    """dK and dV, in k's and v's shapes and the output's dtype, summed over the query heads of a group.

    ``tile`` replaces the table's.
    """
    q, k, v, dout = gradients.q, gradients.k, gradients.v, gradients.dout
    dk = torch.empty(k.shape, dtype=path.output, device=k.device)
    dv = torch.empty(v.shape, dtype=path.output, device=v.device)
    if dk.numel() == 0:
        return dk, dv
    if tile is None:
        tile = backward_tile_of("dkdv", gradients, operands, options, path)
    num_tiles = triton.cdiv(options.longest_k, tile.block_n)
    with device_of(q):
        _dkdv_kernel[(num_tiles * options.segments * k.shape[1],)](
            *with_strides(operands.q, q, operands.k, v, dout, gradients.lse, gradients.delta, dk, dv),
            options.scale,
            num_tiles,
            *pair_arguments(operands, options),
            **pair_constants(tile, options, path, q, k, v, dout, dk, dv, operands.q, operands.k),
            **gradient_constants(gradients, operands, path),
        )
    return dk, dv
