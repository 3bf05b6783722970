"""The gradient of q: one program a tile of queries, over key tiles in ascending order; no atomics.

Scores are recomputed. Rounding points: P and dP in fp32; dS = P * (dP - delta) in fp32, rounded to k's
dtype for the product with k; fp32 accumulation; dQ is rounded once, after the factor ``scale``.
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
def _dq_kernel(
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
    i_t = n_tiles - 1 - tl.program_id(0) % n_tiles
    i_bh = tl.program_id(0) // n_tiles
    i_h = (i_bh % n_heads).to(tl.int64)
    i_b, q_start, k_start, n_queries, n_keys, key_limit, shift, offset = segment(
        i_bh // n_heads, n_queries, n_keys, p_key_lengths, p_cu_q, p_cu_k, BOTTOM_RIGHT
    )
    i_m = i_t * BLOCK_M
    if i_m >= n_queries:
        return

    p_q += i_b * s_q[0] + i_h * s_q[1] + (q_start + i_m) * s_q[2]
    p_k += i_b * s_k[0] + i_h // group * s_k[1] + k_start * s_k[2]
    p_v += i_b * s_v[0] + i_h // group * s_v[1] + k_start * s_v[2]
    p_do += i_b * s_do[0] + i_h * s_do[1] + (q_start + i_m) * s_do[2]
    p_lse += i_b * s_lse[0] + i_h * s_lse[1] + (q_start + i_m) * s_lse[2]
    p_delta += i_b * s_delta[0] + i_h * s_delta[1] + (q_start + i_m) * s_delta[2]
    p_dq += i_b * s_dq[0] + i_h * s_dq[1] + (q_start + i_m) * s_dq[2]
    if p_mask is not None:
        p_mask += i_b * s_mask[0] + i_h * s_mask[1] + q_start * s_mask[2] + k_start * s_mask[3]
    if p_bias is not None:
        p_bias += i_b * s_bias[0] + i_h * s_bias[1] + q_start * s_bias[2] + k_start * s_bias[3]
    slope = 0.0
    if p_slopes is not None:
        slope = tl.load(p_slopes + i_b * s_slopes[0] + i_h * s_slopes[1])

    o_d = tl.arange(0, BLOCK_D)
    o_dv = tl.arange(0, BLOCK_DV)
    o_n = tl.arange(0, BLOCK_N)
    o_row = tl.arange(0, BLOCK_M)
    o_m = i_m + o_row
    m_row = o_m < n_queries
    o_row = o_row.to(tl.int64) if WIDE else o_row
    o_col = o_n.to(tl.int64) if WIDE else o_n
    m_q = m_row[:, None] & (o_d[None, :] < D)
    b_q = tl.load(p_q + o_row[:, None] * s_q[2] + o_d[None, :] * s_q[3], mask=m_q, other=0.0)
    b_do = tl.load(
        p_do + o_row[:, None] * s_do[2] + o_dv[None, :] * s_do[3],
        mask=m_row[:, None] & (o_dv[None, :] < DV),
        other=0.0,
    )
    b_lse2 = tl.load(p_lse + o_row * s_lse[2], mask=m_row, other=0.0) * LOG2E
    b_delta = tl.load(p_delta + o_row * s_delta[2], mask=m_row, other=0.0)
    o_k = o_d[:, None] * s_k[3] + o_col[None, :] * s_k[2]
    o_v = o_dv[:, None] * s_v[3] + o_col[None, :] * s_v[2]

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
        part_start = start if i_part == 0 else (full_start if i_part == 1 else full_stop)
        part_stop = tl.minimum(full_start, stop) if i_part == 0 else (full_stop if i_part == 1 else stop)
        for i_n in tl.range(part_start, part_stop, BLOCK_N):
            o_j = i_n + o_n
            m_k = (o_d[:, None] < D) & (o_j[None, :] < key_limit) if i_part != 1 else (o_d[:, None] < D)
            m_v = (o_dv[:, None] < DV) & (o_j[None, :] < key_limit) if i_part != 1 else (o_dv[:, None] < DV)
            b_k = tl.load(p_k + tl.cast(i_n, tl.int64) * s_k[2] + o_k, mask=m_k, other=0.0)  # [BD, BN]
            b_v = tl.load(p_v + tl.cast(i_n, tl.int64) * s_v[2] + o_v, mask=m_v, other=0.0)  # [BDV, BN]
            b_qk = tl.dot(b_q, b_k, input_precision=PRECISION)  # [BM, BN]
            b_s, b_tanh, m_seen = pair_scores(
                b_qk,
                o_m[:, None],
                o_j[None, :],
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
                s_mask[2],
                s_mask[3],
                p_bias,
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
            b_p = probabilities(b_s, sigma, b_lse2[:, None], m_seen, i_part != 1)
            b_dp = tl.dot(b_do, b_v, input_precision=PRECISION)
            b_ds = score_gradient(b_p, b_dp, b_delta[:, None], m_seen, i_part != 1)
            b_ds = through_cap(b_ds, b_tanh, SOFTCAP)
            b_dq = tl.dot(b_ds.to(b_k.dtype), tl.trans(b_k), b_dq, input_precision=PRECISION)

    tl.store(
        p_dq + o_row[:, None] * s_dq[2] + o_d[None, :] * s_dq[3],
        (b_dq * scale).to(p_dq.dtype.element_ty),
        mask=m_q,
    )


def launch_dq(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, delta: Tensor, options: Options
) -> Tensor:
    """dQ in q's shape and dtype."""
    dq = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if dq.numel() == 0:
        return dq
    tile = backward_tile(
        "dq", q.device.type, q.element_size(), q.shape[3], v.shape[3], options.longest_q, options.longest_k
    )
    num_tiles = triton.cdiv(options.longest_q, tile.block_m)
    with device_of(q):
        _dq_kernel[(num_tiles * options.segments * q.shape[1],)](
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
            dq,
            dq.stride(),
            options.scale,
            num_tiles,
            *pair_arguments(q, k, options),
            **pair_constants(tile, options, q, k, v, dout, dq),
        )
    return dq
