"""The forward pass through the tensor memory accelerator. Rounding points: see `kernels.forward_kernel`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.hopper.calls import columns_descriptor, descriptor, section_heads
from kernels.hopper.launch import band_constants, ends, tiles_of, work_arguments
from kernels.hopper.order import work_item
from kernels.hopper.packed import masked_rows, part_of_rows, placed
from kernels.hopper.pipelined import launch_hopper_pipelined, pipelined_possible
from kernels.launch import device_of, softmax_constants, with_strides
from kernels.launched import Launch, layout, remembered
from kernels.masking import band_sees, row_sees_any, tile_range
from kernels.operands import Operands
from kernels.options import Options
from kernels.rounding import to_operand
from kernels.score_path import FP8, ScorePath, plain_path
from kernels.softmax import maximum_in_log2, online_softmax_step, softmax_output, softmax_start
from kernels.tiles import head_factors
from kernels.tuning import Tile, hopper_tile, mean_length, padded, pipelined_tile

LN2 = tl.constexpr(0.6931471805599453)
_SHORT_ROWS = 64  # padded head dim


@triton.jit(
    do_not_specialize=["n_tiles", "n_rows", "section", "n_queries", "n_keys", "left", "right", "n_segments"]
)
def _hopper_forward_kernel(
    d_q,
    d_k,
    d_v,
    p_o,
    s_o,
    p_lse,
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
    p_v,
    s_v,
    p_qf,
    s_qf,
    p_kf,
    s_kf,
    p_vf,
    s_vf,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BOTTOM_RIGHT: tl.constexpr,
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
    PACKED: tl.constexpr,
    FORMAT: tl.constexpr,
    P_SCALE: tl.constexpr,
    LIFT: tl.constexpr,
    PROMOTE: tl.constexpr,
    SCALES: tl.constexpr,
    V_COLUMNS: tl.constexpr,
    HAS_TAIL: tl.constexpr,
    NEGATIVE: tl.constexpr,
    SUBTRACT_FIRST: tl.constexpr,
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
        p_v += (i_h // group).to(tl.int64) * s_v[1]
    shift = n_keys - n_queries if BOTTOM_RIGHT else 0 * n_keys

    sigma, _ = head_factors(sigma, 1.0, p_qf, s_qf, p_kf, s_kf, i_b, i_h, i_h // group, True, SCALES)
    o_m = i_m + tl.arange(0, BLOCK_M)
    o_n = tl.arange(0, BLOCK_N)
    b_q = d_q.load([i_b, i_h, q_start + i_m, 0]).reshape(BLOCK_M, BLOCK_D)
    b_acc = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
    m_i, l_i = softmax_start(BLOCK_M, NEGATIVE, SUBTRACT_FIRST)
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
    # Keys left of the full tiles (only a window has them), the full tiles, and keys right of them.
    for i_part in tl.static_range(0 if HAS_LEFT else 1, 4 if PACKED else (3 if HAS_TAIL else 2)):
        part_start, part_stop = part_of_rows(
            i_part, start, full_start, full_stop, stop, n_keys, BLOCK_N, PACKED
        )
        for i_n in tl.range(part_start, part_stop, BLOCK_N):
            b_k = d_k.load([i_b, i_h // group, k_start + i_n, 0]).reshape(BLOCK_N, BLOCK_D)
            b_s = tl.dot(b_q, b_k.T)
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
                b_s = tl.where(m_seen, b_s, float("inf") if NEGATIVE else float("-inf"))
            b_p, b_alpha, m_i, l_i = online_softmax_step(b_s, sigma, m_i, l_i, NEGATIVE, SUBTRACT_FIRST, LIFT)
            if i_part == 3:
                # Weights of the next segment's rows are zero, but zero times their NaN is not.
                b_v = masked_rows(p_v, s_v[2], k_start, i_n + o_n, n_keys, D, BLOCK_D, 0)[0]
            elif V_COLUMNS:
                b_v = d_v.load([i_b, i_h // group, 0, i_n]).reshape(BLOCK_D, BLOCK_N).T
            else:
                b_v = d_v.load([i_b, i_h // group, k_start + i_n, 0]).reshape(BLOCK_N, BLOCK_D)
            b_acc = b_acc * b_alpha[:, None]
            b_p = to_operand(b_p if P_SCALE == 1.0 else b_p * P_SCALE, FORMAT)
            if PROMOTE:
                b_acc += tl.dot(b_p, b_v)
            else:
                b_acc = tl.dot(b_p, b_v, b_acc)

    # The mask says whether a row is empty, not m_i: see the portable kernel.
    m_any = row_sees_any(o_m, n_keys, shift, left, right, HAS_LEFT, HAS_RIGHT)
    m_i = maximum_in_log2(m_i, sigma, SUBTRACT_FIRST)
    b_lse = tl.where(m_any, (m_i + tl.log2(l_i)) * LN2, float("-inf"))
    b_o = softmax_output(b_acc, l_i, P_SCALE)
    if p_vf is not None:
        b_o = b_o * tl.load(p_vf + i_b.to(tl.int64) * s_vf[0] + (i_h // group).to(tl.int64) * s_vf[1])
    b_o = tl.where(m_any[:, None], b_o, 0.0)
    m_row = o_m < n_queries
    p_o += i_b.to(tl.int64) * s_o[0] + i_h.to(tl.int64) * s_o[1] + (q_start + i_m).to(tl.int64) * s_o[2]
    o_d = tl.arange(0, BLOCK_D)[None, :]
    o_o = tl.arange(0, BLOCK_M)[:, None] * s_o[2] + o_d
    tl.store(p_o + o_o, b_o.to(p_o.dtype.element_ty), mask=m_row[:, None] & (o_d < D))
    tl.store(p_lse + i_bh.to(tl.int64) * total + q_start + o_m, b_lse, mask=m_row)


def launch_hopper_forward(
    q: Tensor, k: Tensor, v: Tensor, options: Options, tile: Tile | None = None, section: int | None = None
) -> tuple[Tensor, Tensor]:
    """`launch_hopper_products` of 16-bit inputs that `kernels.hopper.calls.possible` accepts."""
    return launch_hopper_products(Operands(q, k, v), options, plain_path(q.dtype), tile, section)


def launch_hopper_products(
    operands: Operands,
    options: Options,
    path: ScorePath,
    tile: Tile | None = None,
    section: int | None = None,
) -> tuple[Tensor, Tensor]:
    """O and the natural log-sum-exp of operands that are ready for the products.

    By `kernels.hopper.pipelined` where that is tuned and covers the call, unless a tile is given.

    Args:
        operands: 16-bit, or fp8 with v's keys contiguous (`kernels.hopper.calls.fp8_possible`).
        tile: launch configuration; by default that of `kernels.tuning`.
        section: heads that run side by side (`kernels.hopper.order`); by default the faster of one and of
            what the cache holds.
    """
    q, k, v = operands.q, operands.k, operands.v
    batch, heads, num_queries, head_dim = q.shape
    num_keys = k.shape[2]
    banded = options.left is not None or options.right is not None
    packed = mean_length(num_keys, options.segments) if options.cu_q is not None else None
    fp8 = path.operand in FP8
    if tile is None and q.device.type == "cuda" and pipelined_possible(options):
        pipelined = pipelined_tile(q.element_size(), head_dim, num_keys, banded, packed)
        if pipelined is not None:
            tile, persistent, turns = pipelined
            return launch_hopper_pipelined(operands, options, path, tile, section, persistent, turns=turns)
    if tile is None:
        kind = "fp8" if fp8 else "forward"
        tile = hopper_tile(kind, q.device.type, head_dim, banded, num_queries, num_keys, packed)
    chosen = tile
    out = torch.empty(q.shape, dtype=path.output, device=q.device)
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)

    def make() -> Launch:
        group = heads // k.shape[1]
        num_tiles = tiles_of(q, chosen.block_m, options)
        side_by_side = section
        if side_by_side is None:
            # Measured on an H200: several heads side by side pay only for short rows under a band; elsewhere
            # one head (or group that shares its keys) after the other is faster. Not swept where packed.
            several = banded and padded(head_dim) <= _SHORT_ROWS
            side_by_side = (
                section_heads(k, options.longest_k, group, batch * heads)
                if several or packed is not None
                else group
            )
        values = columns_descriptor if fp8 else descriptor
        return Launch(
            num_tiles * batch * heads,
            (descriptor(q, chosen.block_m), descriptor(k, chosen.block_n), values(v, chosen.block_n)),
            work_arguments(num_tiles, q, side_by_side, q, k, options),
            {
                **band_constants(chosen, q, options),
                "BLOCK_D": padded(head_dim),
                "FORMAT": path.operand,
                "PROMOTE": path.promote,
                "SCALES": path.scales_mode,
                "V_COLUMNS": fp8,
                "HAS_TAIL": packed is not None or banded or num_keys % chosen.block_n != 0,
                "NEGATIVE": options.sigma < 0,
                **softmax_constants(path, head_dim, options.plain_sigma),
            },
        )

    factors = (operands.q_factor, operands.k_factor, operands.v_factor)
    layouts = [None if x is None else layout(x) for x in (q, k, v, *factors)]
    key = ("forward", chosen, section, path, q.get_device(), *layouts)
    after = (None if packed is None else v, v.stride(), *with_strides(*factors))
    with device_of(q):
        launch = remembered(options.launches, key, make)
        launch.run(_hopper_forward_kernel, (q, k, v), (out, out.stride(), lse), after, ends(options))
    return out, lse
