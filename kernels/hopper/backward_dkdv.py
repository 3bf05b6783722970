"""The gradients of k and v through the tensor memory accelerator.

Rounding points: see `kernels.backward_dkdv`.
"""

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
from kernels.tuning import Tile, computed_apart, hopper_tile


@triton.jit(
    do_not_specialize=["n_tiles", "n_rows", "section", "n_queries", "n_keys", "left", "right", "n_segments"]
)
def _hopper_dkdv_kernel(
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
    BLOCK_D2: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BOTTOM_RIGHT: tl.constexpr,
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
    PACKED: tl.constexpr,
    WANT_DK: tl.constexpr,
    WANT_DV: tl.constexpr,
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
    b_k, b_k2 = load_parts(d_k, d_k2, i_b, i_hk, k_start + i_n, BLOCK_N, BLOCK_D, BLOCK_D2)
    b_v, b_v2 = b_k, b_k2
    if WANT_DK:
        b_v, b_v2 = load_parts(d_v, d_v2, i_b, i_hk, k_start + i_n, BLOCK_N, BLOCK_D, BLOCK_D2)
    b_dk, b_dk2 = zero_parts(BLOCK_N, BLOCK_D, BLOCK_D2)
    b_dv, b_dv2 = zero_parts(BLOCK_N, BLOCK_D, BLOCK_D2)
    last = tl.minimum(i_n + BLOCK_N, n_keys) - 1
    start, full_start, full_stop, stop = tile_range(
        i_n, last, n_queries, -shift, right, left, HAS_RIGHT, HAS_LEFT, False, BLOCK_M
    )
    for i_g in tl.range(0, group):
        i_h = i_hk * group + i_g
        p_lse_head = p_lse + i_b.to(tl.int64) * s_lse[0] + i_h.to(tl.int64) * s_lse[1] + q_start
        p_delta_head = p_delta + i_b.to(tl.int64) * s_delta[0] + i_h.to(tl.int64) * s_delta[1] + q_start
        # Queries above the full tiles (causality has them), the full tiles, and queries below them.
        for i_part in tl.static_range(0 if HAS_RIGHT else 1, 4 if PACKED else 3):
            part_start, part_stop = part_of_rows(
                i_part, start, full_start, full_stop, stop, n_queries, BLOCK_M, PACKED
            )
            for i_m in tl.range(part_start, part_stop, BLOCK_M):
                o_i = i_m + o_m
                if i_part == 3:
                    # P and dS of the next segment's rows are zero, but zero times their NaN is not.
                    p_rows = p_q + i_h.to(tl.int64) * s_q[1]
                    b_q, b_q2 = masked_rows(p_rows, s_q[2], q_start, o_i, n_queries, D, BLOCK_D, BLOCK_D2)
                    p_rows = p_do + i_h.to(tl.int64) * s_do[1]
                    b_do, b_do2 = masked_rows(p_rows, s_do[2], q_start, o_i, n_queries, D, BLOCK_D, BLOCK_D2)
                else:
                    i_q = q_start + i_m
                    b_q, b_q2 = load_parts(d_q, d_q2, i_b, i_h, i_q, BLOCK_M, BLOCK_D, BLOCK_D2)
                    b_do, b_do2 = load_parts(d_do, d_do2, i_b, i_h, i_q, BLOCK_M, BLOCK_D, BLOCK_D2)
                if i_part != 1:
                    b_lse2 = tl.load(p_lse_head + o_i, mask=o_i < n_queries, other=0.0) * LOG2E
                    if WANT_DK:
                        b_delta = tl.load(p_delta_head + o_i, mask=o_i < n_queries, other=0.0)
                else:
                    b_lse2 = tl.load(p_lse_head + o_i) * LOG2E
                    if WANT_DK:
                        b_delta = tl.load(p_delta_head + o_i)
                b_s = product_of_rows(b_k, b_k2, b_q, b_q2, BLOCK_D2)  # [BN, BM]
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
                if WANT_DV:
                    b_dv, b_dv2 = add_product(b_p.to(b_do.dtype), b_do, b_do2, b_dv, b_dv2, BLOCK_D2)
                if WANT_DK:
                    b_dp = product_of_rows(b_v, b_v2, b_do, b_do2, BLOCK_D2)
                    b_ds = score_gradient(b_p, b_dp, b_delta[None, :], m_seen, i_part != 1)
                    b_dk, b_dk2 = add_product(b_ds.to(b_q.dtype), b_q, b_q2, b_dk, b_dk2, BLOCK_D2)

    first = (i_bh.to(tl.int64) * total + k_start + i_n) * D
    m_row = o_j < n_keys
    if WANT_DK:
        store_rows(p_dk, first, m_row, b_dk, b_dk2, scale, D, BLOCK_D, BLOCK_D2)
    if WANT_DV:
        store_rows(p_dv, first, m_row, b_dv, b_dv2, 1.0, D, BLOCK_D, BLOCK_D2)


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
        tile: launch configuration; by default that of `kernels.tuning`, in one launch or in one for each.
        section: heads that run side by side (`kernels.hopper.order`); by default what the cache holds.
    """
    tensors = (dout, q, k, v, lse, delta, options)
    banded = options.left is not None or options.right is not None
    if tile is None and computed_apart(q.device.type, q.shape[3], banded):
        return launch_hopper_dk(*tensors, None, section), launch_hopper_dv(*tensors, None, section)
    dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (k, v))
    _launch("dkdv", dk, dv, *tensors, tile, section)
    return dk, dv


def launch_hopper_dk(
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
    """dK alone: three products a tile, and room for twice the keys in registers. Arguments as above."""
    dk = torch.empty(k.shape, dtype=k.dtype, device=k.device)
    _launch("dk", dk, None, dout, q, k, v, lse, delta, options, tile, section)
    return dk


def launch_hopper_dv(
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
    """dV alone: two products a tile. Arguments as above."""
    dv = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    _launch("dv", None, dv, dout, q, k, v, lse, delta, options, tile, section)
    return dv


def _launch(
    kernel: str,
    dk: Tensor | None,
    dv: Tensor | None,
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lse: Tensor,
    delta: Tensor,
    options: Options,
    tile: Tile | None,
    section: int | None,
) -> None:
    banded = options.left is not None or options.right is not None
    chosen = tile or hopper_tile(kernel, q.device.type, q.shape[3], banded, q.shape[2], k.shape[2])

    def make() -> Launch:
        widths, heads = chosen.widths(q.shape[3]), k.shape[0] * k.shape[1]
        num_tiles = tiles_of(k, chosen.block_n, options)
        side_by_side = section
        if side_by_side is None:
            side_by_side = section_heads(q, options.longest_q, 1, heads) if banded else 1
        rows = ((q, chosen.block_m), (k, chosen.block_n), (v, chosen.block_n), (dout, chosen.block_m))
        return Launch(
            num_tiles * heads,
            [x for tensor, n in rows for x in part_descriptors(tensor, n, widths)],
            work_arguments(num_tiles, k, side_by_side, q, k, options),
            {
                **band_constants(chosen, q, options),
                "BLOCK_D": widths[0],
                "BLOCK_D2": widths[1],
                "WANT_DK": dk is not None,
                "WANT_DV": dv is not None,
            },
        )

    key = (kernel, chosen, section, q.get_device(), *map(layout, (q, k, v, dout, lse, delta)))
    before = (lse, lse.stride(), delta, delta.stride(), dk, dv, options.scale)
    packed = options.cu_k is not None
    after = (q if packed else None, q.stride(), dout if packed else None, dout.stride())
    with device_of(q):
        launch = remembered(options.launches, key, make)
        described = (q, q, k, k, v, v, dout, dout)
        launch.run(_hopper_dkdv_kernel, described, before, after, ends(options))
