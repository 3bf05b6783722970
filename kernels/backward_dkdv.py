"""The gradients of k and v: one program a tile of keys, over the group's heads and query tiles; no atomics.

Tiles are transposed (keys down, queries across), so that P^T and dS^T enter their products as they are.
Rounding points: P in fp32, rounded to dO's dtype for dV; dS in fp32, rounded to q's dtype for dK; both sums
run in fp32 over heads and query tiles in ascending order, and are rounded once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gradients import probabilities, score_gradient, through_cap
from kernels.launch import device_of, pair_arguments, pair_constants
from kernels.masking import segment, tile_range
from kernels.options import Options
from kernels.scores import LOG2E, pair_scores
from kernels.tuning import backward_tile


@triton.jit(do_not_specialize=["n_tiles", "n_queries", "n_keys", "left", "right"])
def _dkdv_kernel(
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
    PRECISION: tl.constexpr,
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

    p_k += i_b * s_k[0] + i_hk * s_k[1] + (k_start + i_n) * s_k[2]
    p_v += i_b * s_v[0] + i_hk * s_v[1] + (k_start + i_n) * s_v[2]
    p_dk += i_b * s_dk[0] + i_hk * s_dk[1] + (k_start + i_n) * s_dk[2]
    p_dv += i_b * s_dv[0] + i_hk * s_dv[1] + (k_start + i_n) * s_dv[2]
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
    b_k = tl.load(
        p_k + o_row[:, None] * s_k[2] + o_d[None, :] * s_k[3], mask=m_read & (o_d[None, :] < D), other=0.0
    )
    b_v = tl.load(
        p_v + o_row[:, None] * s_v[2] + o_dv[None, :] * s_v[3], mask=m_read & (o_dv[None, :] < DV), other=0.0
    )
    o_q = o_d[:, None] * s_q[3] + o_col[None, :] * s_q[2]
    o_do = o_col[:, None] * s_do[2] + o_dv[None, :] * s_do[3]

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
        p_q_head = p_q + i_b * s_q[0] + i_h * s_q[1] + q_start * s_q[2]
        p_do_head = p_do + i_b * s_do[0] + i_h * s_do[1] + q_start * s_do[2]
        p_lse_head = p_lse + i_b * s_lse[0] + i_h * s_lse[1] + q_start * s_lse[2]
        p_delta_head = p_delta + i_b * s_delta[0] + i_h * s_delta[1] + q_start * s_delta[2]
        p_mask_head = p_mask
        p_bias_head = p_bias
        slope = 0.0
        if p_mask is not None:
            p_mask_head = (
                p_mask + i_b * s_mask[0] + i_h * s_mask[1] + q_start * s_mask[2] + k_start * s_mask[3]
            )
        if p_bias is not None:
            p_bias_head = (
                p_bias + i_b * s_bias[0] + i_h * s_bias[1] + q_start * s_bias[2] + k_start * s_bias[3]
            )
        if p_slopes is not None:
            slope = tl.load(p_slopes + i_b * s_slopes[0] + i_h * s_slopes[1])
        # Queries above the full tiles, the full tiles, and queries below them; only causality has the first.
        for i_part in tl.static_range(2 if DATA_MASK else (0 if HAS_RIGHT else 1), 3):
            part_start = start if i_part == 0 else (full_start if i_part == 1 else full_stop)
            part_stop = tl.minimum(full_start, stop) if i_part == 0 else (full_stop if i_part == 1 else stop)
            for i_m in tl.range(part_start, part_stop, BLOCK_M):
                o_i = i_m + o_m
                m_row = o_i < n_queries
                i_row = tl.cast(i_m, tl.int64)
                m_q = (o_d[:, None] < D) & m_row[None, :] if i_part != 1 else (o_d[:, None] < D)
                m_do = m_row[:, None] & (o_dv[None, :] < DV) if i_part != 1 else (o_dv[None, :] < DV)
                b_q = tl.load(p_q_head + i_row * s_q[2] + o_q, mask=m_q, other=0.0)  # [BD, BM]
                b_do = tl.load(p_do_head + i_row * s_do[2] + o_do, mask=m_do, other=0.0)  # [BM, BDV]
                b_lse2 = (
                    tl.load(p_lse_head + i_row * s_lse[2] + o_col * s_lse[2], mask=m_row, other=0.0) * LOG2E
                )
                b_delta = tl.load(
                    p_delta_head + i_row * s_delta[2] + o_col * s_delta[2], mask=m_row, other=0.0
                )
                b_qk = tl.dot(b_k, b_q, input_precision=PRECISION)  # [BN, BM]
                b_s, b_tanh, m_seen = pair_scores(
                    b_qk,
                    o_i[None, :],
                    o_j[:, None],
                    n_queries,
                    key_limit,
                    shift,
                    left,
                    right,
                    offset,
                    score_factor,
                    cap,
                    slope,
                    p_mask_head,
                    s_mask[2],
                    s_mask[3],
                    p_bias_head,
                    s_bias[2],
                    s_bias[3],
                    HAS_LEFT,
                    HAS_RIGHT,
                    i_part != 1,
                    PLAIN,
                    SOFTCAP,
                    p_slopes is not None,
                    float("-inf"),
                )
                b_p = probabilities(b_s, sigma, b_lse2[None, :], m_seen, i_part != 1)
                b_dv = tl.dot(b_p.to(b_do.dtype), b_do, b_dv, input_precision=PRECISION)
                b_dp = tl.dot(b_v, tl.trans(b_do), input_precision=PRECISION)
                b_ds = score_gradient(b_p, b_dp, b_delta[None, :], m_seen, i_part != 1)
                b_ds = through_cap(b_ds, b_tanh, SOFTCAP)
                b_dk = tl.dot(b_ds.to(b_q.dtype), tl.trans(b_q), b_dk, input_precision=PRECISION)

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
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, delta: Tensor, options: Options
) -> tuple[Tensor, Tensor]:
    """dK and dV, in k's and v's shapes and dtype, summed over the query heads of a group."""
    dk = torch.empty(k.shape, dtype=k.dtype, device=k.device)
    dv = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    if dk.numel() == 0:
        return dk, dv
    tile = backward_tile(
        "dkdv", q.device.type, q.element_size(), q.shape[3], v.shape[3], options.longest_q, options.longest_k
    )
    num_tiles = triton.cdiv(options.longest_k, tile.block_n)
    with device_of(q):
        _dkdv_kernel[(num_tiles * options.segments * k.shape[1],)](
            q,
            q.stride(),
            k,
            k.stride(),
            v,
            v.stride(),
            dout,
            dout.stride(),
            lse,
            lse.stride(),
            delta,
            delta.stride(),
            dk,
            dk.stride(),
            dv,
            dv.stride(),
            options.scale,
            num_tiles,
            *pair_arguments(q, k, options),
            **pair_constants(tile, options, q, k, v, dout, dk, dv),
        )
    return dk, dv
