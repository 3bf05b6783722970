"""The gradient of q through the tensor memory accelerator. Rounding points: see `kernels.backward_dq`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gradients import probabilities, score_gradient
from kernels.hopper.calls import part_descriptors, section_heads
from kernels.hopper.halves import add_product, load_parts, product_of_rows, store_rows, zero_parts
from kernels.hopper.launch import band_constants, ends, tiles_of, work_arguments
from kernels.hopper.order import work_item
from kernels.hopper.packed import masked_rows, part_of_rows, placed
from kernels.launch import device_of
from kernels.launched import Launch, layout, remembered
from kernels.masking import band_sees, tile_range
from kernels.options import Options
from kernels.scores import LOG2E
from kernels.tuning import Tile, hopper_tile


@triton.jit(
    do_not_specialize=["n_tiles", "n_rows", "section", "n_queries", "n_keys", "left", "right", "n_segments"]
)
def _hopper_dq_kernel(
    d_q,
    d_q2,
    d_k,
    d_k2,
    d_v,
    d_v2,
    d_do,
    d_do2,
    p_lse,
    s_lse,
    p_delta,
    s_delta,
    p_dq,
    scale,
    n_tiles,
    n_rows,
    section,
    n_heads,
    group,
    n_queries,
    n_keys,
    sigma,
    left,
    right,
    p_cu_q,
    p_cu_k,
    n_segments,
    p_k,
    s_k,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_D2: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BOTTOM_RIGHT: tl.constexpr,
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
    PACKED: tl.constexpr,
):
    i_t, i_bh = work_item(tl.program_id(0), n_tiles, n_rows, section)
    i_b = i_bh // n_heads
    i_h = i_bh % n_heads
    i_t = n_tiles - 1 - i_t
    total = n_queries
    i_m, q_start, k_start, n_queries, n_keys = placed(
        i_t, n_queries, n_keys, p_cu_q, p_cu_k, n_segments, False, BLOCK_M, PACKED
    )
    if PACKED:
        if i_m >= n_queries:
            return
        p_k += (i_h // group).to(tl.int64) * s_k[1]
    shift = n_keys - n_queries if BOTTOM_RIGHT else 0 * n_keys

    o_m = i_m + tl.arange(0, BLOCK_M)
    o_n = tl.arange(0, BLOCK_N)
    m_row = o_m < n_queries
    b_q, b_q2 = load_parts(d_q, d_q2, i_b, i_h, q_start + i_m, BLOCK_M, BLOCK_D, BLOCK_D2)
    b_do, b_do2 = load_parts(d_do, d_do2, i_b, i_h, q_start + i_m, BLOCK_M, BLOCK_D, BLOCK_D2)
    p_lse += i_b.to(tl.int64) * s_lse[0] + i_h.to(tl.int64) * s_lse[1] + q_start
    p_delta += i_b.to(tl.int64) * s_delta[0] + i_h.to(tl.int64) * s_delta[1] + q_start
    b_lse2 = tl.load(p_lse + o_m, mask=m_row, other=0.0) * LOG2E
    b_delta = tl.load(p_delta + o_m, mask=m_row, other=0.0)
    b_dq, b_dq2 = zero_parts(BLOCK_M, BLOCK_D, BLOCK_D2)
    start, full_start, full_stop, stop = tile_range(
        i_m,
        tl.minimum(i_m + BLOCK_M, n_queries) - 1,
        n_keys,
        shift,
        left,
        right,
        HAS_LEFT,
        HAS_RIGHT,
        False,
        BLOCK_N,
    )
    for i_part in tl.static_range(0 if HAS_LEFT else 1, 4 if PACKED else 3):
        part_start, part_stop = part_of_rows(
            i_part, start, full_start, full_stop, stop, n_keys, BLOCK_N, PACKED
        )
        for i_n in tl.range(part_start, part_stop, BLOCK_N):
            i_key = k_start + i_n
            if i_part == 3:
                # dS of the next segment's rows is zero, but zero times their NaN is not.
                b_k, b_k2 = masked_rows(p_k, s_k[2], k_start, i_n + o_n, n_keys, D, BLOCK_D, BLOCK_D2)
            else:
                b_k, b_k2 = load_parts(d_k, d_k2, i_b, i_h // group, i_key, BLOCK_N, BLOCK_D, BLOCK_D2)
            b_v, b_v2 = load_parts(d_v, d_v2, i_b, i_h // group, i_key, BLOCK_N, BLOCK_D, BLOCK_D2)
            b_s = product_of_rows(b_q, b_q2, b_k, b_k2, BLOCK_D2)
            b_dp = product_of_rows(b_do, b_do2, b_v, b_v2, BLOCK_D2)
            m_seen = (o_n >= 0)[None, :]
            if i_part != 1:
                m_seen = band_sees(
                    o_m[:, None],
                    (i_n + o_n)[None, :],
                    n_queries,
                    n_keys,
                    shift,
                    left,
                    right,
                    HAS_LEFT,
                    HAS_RIGHT,
                )
            b_p = probabilities(b_s, sigma, b_lse2[:, None], m_seen, i_part != 1)
            b_ds = score_gradient(b_p, b_dp, b_delta[:, None], m_seen, i_part != 1)
            b_dq, b_dq2 = add_product(b_ds.to(b_k.dtype), b_k, b_k2, b_dq, b_dq2, BLOCK_D2)

    first = (i_bh.to(tl.int64) * total + q_start + i_m) * D
    store_rows(p_dq, first, m_row, b_dq, b_dq2, scale, D, BLOCK_D, BLOCK_D2)


def launch_hopper_dq(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lse: Tensor,
    delta: Tensor,
    options: Options,
    tile: Tile | None = None,
    section: int | None = None,
) -> Tensor:
    """dQ of a call that the Hopper kernels take.

    Args:
        lse, delta: (batch, heads, Nq) fp32 with contiguous rows.
        tile: launch configuration; by default that of `kernels.tuning`.
        section: heads that run side by side (`kernels.hopper.order`); by default what the cache holds.
    """
    batch, heads, num_queries, head_dim = q.shape
    dq = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    banded = options.left is not None or options.right is not None
    chosen = tile or hopper_tile("dq", q.device.type, head_dim, banded, num_queries, k.shape[2])

    def make() -> Launch:
        widths, group = chosen.widths(head_dim), heads // k.shape[1]
        num_tiles = tiles_of(q, chosen.block_m, options)
        side_by_side = section
        if side_by_side is None:
            side_by_side = section_heads(k, options.longest_k, group, batch * heads) if banded else group
        rows = ((q, chosen.block_m), (k, chosen.block_n), (v, chosen.block_n), (dout, chosen.block_m))
        return Launch(
            num_tiles * batch * heads,
            [x for tensor, n in rows for x in part_descriptors(tensor, n, widths)],
            work_arguments(num_tiles, q, side_by_side, q, k, options),
            {
                **band_constants(chosen, q, options),
                "BLOCK_D": widths[0],
                "BLOCK_D2": widths[1],
            },
        )

    key = ("dq", chosen, section, q.get_device(), *map(layout, (q, k, v, dout, lse, delta)))
    before = (lse, lse.stride(), delta, delta.stride(), dq, options.scale)
    after = (k if options.cu_q is not None else None, k.stride())
    with device_of(q):
        remembered(options.launches, key, make).run(
            _hopper_dq_kernel, (q, q, k, k, v, v, dout, dout), before, after, ends(options)
        )
    return dq
