"""The gradients of k and v through the tensor memory accelerator.

Rounding points: see `kernels.backward_dkdv`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gradients import probabilities, score_gradient
from kernels.hopper.calls import descriptor, section_heads
from kernels.hopper.launch import band_constants, tiles_of, work_arguments
from kernels.hopper.order import work_item
from kernels.hopper.packed import masked_rows, placed
from kernels.launch import device_of
from kernels.masking import band_sees, part_of_range, tile_range
from kernels.options import Options
from kernels.scores import LOG2E
from kernels.tuning import Tile, hopper_tile


@triton.jit(
    do_not_specialize=["n_tiles", "n_rows", "section", "n_queries", "n_keys", "left", "right", "n_segments"]
)
def _hopper_dkdv_kernel(
    d_q,
    d_k,
    d_v,
    d_do,
    p_lse,
    s_lse,
    p_delta,
    s_delta,
    p_dk,
    p_dv,
    scale,
    n_tiles,
    n_rows,
    section,
    n_kv_heads,
    group,
    n_queries,
    n_keys,
    sigma,
    left,
    right,
    p_cu_q,
    p_cu_k,
    n_segments,
    p_q,
    s_q,
    p_do,
    s_do,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BOTTOM_RIGHT: tl.constexpr,
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
    PACKED: tl.constexpr,
):
    # Under a causal mask the first keys are seen by the most queries: they start first.
    i_t, i_bh = work_item(tl.program_id(0), n_tiles, n_rows, section)
    i_b = i_bh // n_kv_heads
    i_hk = i_bh % n_kv_heads
    total = n_keys
    i_n, q_start, k_start, n_queries, n_keys = placed(
        i_t, n_queries, n_keys, p_cu_q, p_cu_k, n_segments, True, BLOCK_N, PACKED
    )
    if PACKED:  # noqa: SIM102
        if i_n >= n_keys:
            return
    shift = n_keys - n_queries if BOTTOM_RIGHT else 0 * n_keys

    o_j = i_n + tl.arange(0, BLOCK_N)
    o_m = tl.arange(0, BLOCK_M)
    b_k = d_k.load([i_b, i_hk, k_start + i_n, 0]).reshape(BLOCK_N, BLOCK_D)
    b_v = d_v.load([i_b, i_hk, k_start + i_n, 0]).reshape(BLOCK_N, BLOCK_D)
    b_dk = tl.zeros([BLOCK_N, BLOCK_D], dtype=tl.float32)
    b_dv = tl.zeros([BLOCK_N, BLOCK_D], dtype=tl.float32)
    last = tl.minimum(i_n + BLOCK_N, n_keys) - 1
    start, full_start, full_stop, stop = tile_range(
        i_n, last, n_queries, -shift, right, left, HAS_RIGHT, HAS_LEFT, False, BLOCK_M
    )
    for i_g in tl.range(0, group):
        i_h = i_hk * group + i_g
        p_lse_head = p_lse + i_b.to(tl.int64) * s_lse[0] + i_h.to(tl.int64) * s_lse[1] + q_start
        p_delta_head = p_delta + i_b.to(tl.int64) * s_delta[0] + i_h.to(tl.int64) * s_delta[1] + q_start
        # Queries above the full tiles (causality has them), the full tiles, and queries below them.
        for i_part in tl.static_range(0 if HAS_RIGHT else 1, 3):
            part_start, part_stop = part_of_range(i_part, start, full_start, full_stop, stop)
            for i_m in tl.range(part_start, part_stop, BLOCK_M):
                o_i = i_m + o_m
                if PACKED and i_part != 1:
                    # P and dS of the next segment's rows are zero, but zero times their NaN is not.
                    b_q = masked_rows(
                        p_q + i_h.to(tl.int64) * s_q[1], s_q[2], q_start, o_i, n_queries, D, BLOCK_D
                    )
                    b_do = masked_rows(
                        p_do + i_h.to(tl.int64) * s_do[1], s_do[2], q_start, o_i, n_queries, D, BLOCK_D
                    )
                else:
                    b_q = d_q.load([i_b, i_h, q_start + i_m, 0]).reshape(BLOCK_M, BLOCK_D)
                    b_do = d_do.load([i_b, i_h, q_start + i_m, 0]).reshape(BLOCK_M, BLOCK_D)
                if i_part != 1:
                    b_lse2 = tl.load(p_lse_head + o_i, mask=o_i < n_queries, other=0.0) * LOG2E
                    b_delta = tl.load(p_delta_head + o_i, mask=o_i < n_queries, other=0.0)
                else:
                    b_lse2 = tl.load(p_lse_head + o_i) * LOG2E
                    b_delta = tl.load(p_delta_head + o_i)
                b_s = tl.dot(b_k, b_q.T)  # [BN, BM]
                m_seen = (o_i >= 0)[None, :]
                if i_part != 1:
                    m_seen = band_sees(
                        o_i[None, :],
                        o_j[:, None],
                        n_queries,
                        n_keys,
                        shift,
                        left,
                        right,
                        HAS_LEFT,
                        HAS_RIGHT,
                    )
                b_p = probabilities(b_s, sigma, b_lse2[None, :], m_seen, i_part != 1)
                b_dv = tl.dot(b_p.to(b_do.dtype), b_do, b_dv)
                b_dp = tl.dot(b_v, b_do.T)
                b_ds = score_gradient(b_p, b_dp, b_delta[None, :], m_seen, i_part != 1)
                b_dk = tl.dot(b_ds.to(b_q.dtype), b_q, b_dk)

    o_out = (i_bh.to(tl.int64) * total + k_start + i_n) * D
    o_d = tl.arange(0, BLOCK_D)[None, :]
    o_out += tl.arange(0, BLOCK_N)[:, None] * D + o_d
    m_write = (o_j < n_keys)[:, None] & (o_d < D)
    tl.store(p_dk + o_out, (b_dk * scale).to(p_dk.dtype.element_ty), mask=m_write)
    tl.store(p_dv + o_out, b_dv.to(p_dv.dtype.element_ty), mask=m_write)


def launch_hopper_dkdv(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lse: Tensor,
    delta: Tensor,
    options: Options,
    tile: Tile | None = None,
    section: int | None = None,
) -> tuple[Tensor, Tensor]:
    """dK and dV, summed over the query heads of a group, of a call that the Hopper kernels take.

    Args:
        lse, delta: (batch, heads, Nq) fp32 with contiguous rows.
        tile: launch configuration; by default that of `kernels.tuning`.
        section: heads that run side by side (`kernels.hopper.order`); by default what the cache holds.
    """
    batch, kv_heads, num_keys, head_dim = k.shape
    num_queries = q.shape[2]
    dk = torch.empty(k.shape, dtype=k.dtype, device=k.device)
    dv = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    banded = options.left is not None or options.right is not None
    tile = tile or hopper_tile("dkdv", q.device.type, head_dim, banded, num_queries, num_keys)
    packed = options.cu_k is not None
    num_tiles = tiles_of(k, tile.block_n, options)
    if section is None:
        section = section_heads(q, 1, batch * kv_heads) if banded else 1
    with device_of(q):
        _hopper_dkdv_kernel[(num_tiles * batch * kv_heads,)](
            descriptor(q, tile.block_m),
            descriptor(k, tile.block_n),
            descriptor(v, tile.block_n),
            descriptor(dout, tile.block_m),
            lse,
            lse.stride(),
            delta,
            delta.stride(),
            dk,
            dv,
            options.scale,
            *work_arguments(num_tiles, k, section, q, k, options),
            q if packed else None,
            q.stride(),
            dout if packed else None,
            dout.stride(),
            **band_constants(tile, q, options),
        )
    return dk, dv
