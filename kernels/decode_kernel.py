"""Attention of a few queries over a long cache: keys are split among programs, and the parts are merged.

Each program walks one share of the keys for the query rows of one key/value head (all heads of its group
together) and leaves an unnormalised sum, its reference and its row sum in fp32; a second kernel merges them
in ascending order, adds the sink and divides. A share without visible keys has row sum 0 and changes nothing.
Scores, masks, the softmax step and the roundings are those of the other kernels. Flash-Decoding,
Dao et al. 2023.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.launch import device_of, with_strides
from kernels.masking import row_sees_any, tile_range
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
from kernels.tiles import tile_scores
from kernels.tuning import Tile, decode_tile, padded

LN2 = tl.constexpr(0.6931471805599453)
_MERGED_ROWS = 16
MOST_SPLITS = 64


@triton.jit
def _length_of(p_lengths, i_b, n_keys):
    """Keys in the cache of batch i_b."""
    length = n_keys
    if p_lengths is not None:
        length = tl.minimum(tl.maximum(tl.load(p_lengths + i_b), 0), n_keys).to(tl.int32)
    return length


@triton.jit
def _cached_rows(p_table, s_table, i_b, o_j, m_key, page_size, s_cache):
    """64-bit offsets of keys o_j in a cache of pages, or of one batch after the other."""
    if p_table is not None:
        o_page = o_j // page_size
        page = tl.load(p_table + i_b * s_table[0] + o_page * s_table[1], mask=m_key, other=0).to(tl.int64)
        offsets = page * s_cache[0] + (o_j - o_page * page_size).to(tl.int64) * s_cache[2]
    else:
        offsets = i_b * s_cache[0] + o_j.to(tl.int64) * s_cache[2]
    return offsets


@triton.jit(do_not_specialize=["n_tiles", "n_splits", "n_queries", "n_keys", "page_size", "left", "right"])
def _decode_kernel(
    p_q,
    s_q,
    p_k,
    s_k,
    p_v,
    s_v,
    p_acc,
    s_acc,
    p_top,
    s_top,
    p_sum,
    s_sum,  # noqa: ARG001
    p_table,
    s_table,
    p_lengths,
    n_tiles,
    n_splits,
    n_kv_heads,
    group,
    n_queries,
    n_keys,
    page_size,
    sigma,
    score_factor,
    cap,
    left,
    right,
    D: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
    PLAIN: tl.constexpr,
    SOFTCAP: tl.constexpr,
    NEGATIVE: tl.constexpr,
    SUBTRACT_FIRST: tl.constexpr,
    PRECISION: tl.constexpr,
    FORMAT: tl.constexpr,
    P_SCALE: tl.constexpr,
    PROMOTE: tl.constexpr,
):
    i_split = tl.program_id(0) % n_splits
    i_t = tl.program_id(0) // n_splits % n_tiles
    i_bh = tl.program_id(0) // n_splits // n_tiles
    i_b, i_hk = (i_bh // n_kv_heads).to(tl.int64), (i_bh % n_kv_heads).to(tl.int64)
    length = _length_of(p_lengths, i_b, n_keys)
    shift = length - n_queries
    # Rows of a tile: query by query, the heads of the group side by side.
    o_r = i_t * BLOCK_M + tl.arange(0, BLOCK_M)
    m_row = o_r < n_queries * group
    o_i = o_r // group
    o_h = i_hk * group + (o_r % group).to(tl.int64)
    o_d = tl.arange(0, BLOCK_D)
    o_dv = tl.arange(0, BLOCK_DV)
    o_n = tl.arange(0, BLOCK_N)
    o_q = i_b * s_q[0] + o_h * s_q[1] + o_i.to(tl.int64) * s_q[2]
    m_q = m_row[:, None] & (o_d < D)[None, :]
    b_q = tl.load(p_q + o_q[:, None] + o_d.to(tl.int64)[None, :] * s_q[3], mask=m_q, other=0.0)

    first = i_t * BLOCK_M // group
    last = tl.minimum(i_t * BLOCK_M + BLOCK_M, n_queries * group) - 1
    start, _full_start, _full_stop, stop = tile_range(
        first, last // group, length, shift, left, right, HAS_LEFT, HAS_RIGHT, True, BLOCK_N
    )
    share = tl.cdiv(tl.cdiv(stop - start, BLOCK_N), n_splits) * BLOCK_N
    start += i_split * share
    stop = tl.minimum(start + share, stop)
    where = (n_queries, length, shift, left, right, shift)
    no_strides = (0, 0, 0, 0)
    b_acc = tl.zeros([BLOCK_M, BLOCK_DV], dtype=tl.float32)
    m_i, l_i = softmax_start(BLOCK_M, NEGATIVE, SUBTRACT_FIRST)
    for i_n in tl.range(start, stop, BLOCK_N):
        o_j = i_n + o_n
        m_key = o_j < length
        o_k = _cached_rows(p_table, s_table, i_b, o_j, m_key, page_size, s_k) + i_hk * s_k[1]
        o_v = _cached_rows(p_table, s_table, i_b, o_j, m_key, page_size, s_v) + i_hk * s_v[1]
        m_k = (o_d < D)[:, None] & m_key[None, :]
        b_k = tl.load(p_k + o_k[None, :] + o_d.to(tl.int64)[:, None] * s_k[3], mask=m_k, other=0.0)
        b_s, _, _m_seen = tile_scores(
            b_q,
            b_k,
            1.0,
            1.0,
            o_i[:, None],
            o_j[None, :],
            where,
            score_factor,
            cap,
            0.0,
            None,
            no_strides,
            None,
            no_strides,
            HAS_LEFT,
            HAS_RIGHT,
            True,
            PLAIN,
            SOFTCAP,
            False,
            0,
            PRECISION,
            float("inf") if NEGATIVE else float("-inf"),
        )
        b_p, b_alpha, m_i, l_i = online_softmax_step(b_s, sigma, m_i, l_i, NEGATIVE, SUBTRACT_FIRST)
        m_v = m_key[:, None] & (o_dv < DV)[None, :]
        b_v = tl.load(p_v + o_v[:, None] + o_dv.to(tl.int64)[None, :] * s_v[3], mask=m_v, other=0.0)
        b_acc = b_acc * b_alpha[:, None]
        b_p = to_operand(b_p if P_SCALE == 1.0 else b_p * P_SCALE, FORMAT)
        if PROMOTE:
            b_acc += tl.dot(b_p, b_v, input_precision=PRECISION)
        else:
            b_acc = tl.dot(b_p, b_v, b_acc, input_precision=PRECISION)

    # An untouched running maximum is an infinity of the scores' sign; parts are merged in log2 units.
    b_top = maximum_in_log2(m_i, sigma, SUBTRACT_FIRST)
    o_part = i_split * s_top[0] + i_b * s_top[1] + o_h * s_top[2] + o_i.to(tl.int64) * s_top[3]
    tl.store(p_top + o_part, b_top, mask=m_row)
    tl.store(p_sum + o_part, l_i, mask=m_row)
    o_acc = i_split * s_acc[0] + i_b * s_acc[1] + o_h * s_acc[2] + o_i.to(tl.int64) * s_acc[3]
    m_acc = m_row[:, None] & (o_dv < DV)[None, :]
    tl.store(p_acc + o_acc[:, None] + o_dv[None, :], b_acc, mask=m_acc)


@triton.jit(do_not_specialize=["n_tiles", "n_splits", "n_queries", "n_keys", "left", "right"])
def _merge_kernel(
    p_acc,
    s_acc,
    p_top,
    s_top,
    p_sum,
    s_sum,  # noqa: ARG001
    p_o,
    s_o,
    p_lse,
    s_lse,
    p_sink,
    p_lengths,
    n_tiles,
    n_splits,
    n_heads,
    n_queries,
    n_keys,
    left,
    right,
    DV: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
    P_SCALE: tl.constexpr,
):
    i_t = tl.program_id(0) % n_tiles
    i_bh = tl.program_id(0) // n_tiles
    i_b, i_h = (i_bh // n_heads).to(tl.int64), (i_bh % n_heads).to(tl.int64)
    length = _length_of(p_lengths, i_b, n_keys)
    o_i = i_t * BLOCK_M + tl.arange(0, BLOCK_M)
    o_dv = tl.arange(0, BLOCK_DV)
    m_row = o_i < n_queries
    m_tile = m_row[:, None] & (o_dv < DV)[None, :]
    o_row = o_i.to(tl.int64)
    m_i = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    l_i = tl.zeros([BLOCK_M], dtype=tl.float32)
    b_acc = tl.zeros([BLOCK_M, BLOCK_DV], dtype=tl.float32)
    for i_split in tl.range(0, n_splits):
        o_part = tl.cast(i_split, tl.int64) * s_top[0] + i_b * s_top[1] + i_h * s_top[2] + o_row * s_top[3]
        b_top = tl.load(p_top + o_part, mask=m_row, other=float("-inf"))
        b_sum = tl.load(p_sum + o_part, mask=m_row, other=0.0)
        o_acc = tl.cast(i_split, tl.int64) * s_acc[0] + i_b * s_acc[1] + i_h * s_acc[2] + o_row * s_acc[3]
        b_part = tl.load(p_acc + o_acc[:, None] + o_dv[None, :], mask=m_tile, other=0.0)
        m_new = tl.maximum(m_i, b_top)
        m_base = tl.where(m_new == float("-inf"), 0.0, m_new)
        b_old, b_new = tl.exp2(m_i - m_base), tl.exp2(b_top - m_base)
        l_i = l_i * b_old + b_sum * b_new
        b_acc = b_acc * b_old[:, None] + b_part * b_new[:, None]
        m_i = m_new
    sink = float("-inf")
    if p_sink is not None:
        sink = tl.load(p_sink + i_h)
        m_new = tl.maximum(m_i, sink * LOG2E)
        m_base = tl.where(m_new == float("-inf"), 0.0, m_new)
        b_old = relative_weight(m_i, m_base)
        b_acc = b_acc * b_old[:, None]
        l_i = l_i * b_old + relative_weight(sink * LOG2E, m_base)
        m_i = m_new
    m_any = row_sees_any(o_i, length, length - n_queries, left, right, HAS_LEFT, HAS_RIGHT)
    b_lse = tl.where(m_any, (m_i + tl.log2(l_i)) * LN2, sink)
    b_o = softmax_output(b_acc, l_i, P_SCALE)
    b_o = tl.where(m_any[:, None], b_o, 0.0)
    o_o = i_b * s_o[0] + i_h * s_o[1] + o_row[:, None] * s_o[2] + o_dv.to(tl.int64)[None, :] * s_o[3]
    tl.store(p_o + o_o, b_o.to(p_o.dtype.element_ty), mask=m_tile)
    tl.store(p_lse + i_b * s_lse[0] + i_h * s_lse[1] + o_row * s_lse[2], b_lse, mask=m_row)


def launch_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    block_table: Tensor | None,
    options: Options,
    path: ScorePath,
    num_splits: int | None,
    tile: Tile | None = None,
) -> tuple[Tensor, Tensor]:
    """O (batch, heads, Nq, value dim) and the natural log-sum-exp (batch, heads, Nq) in fp32.

    ``tile`` replaces the table's.
    """
    batch, heads, num_queries, head_dim = q.shape
    kv_heads, page_size, value_dim = k.shape[1], k.shape[2], v.shape[3]
    num_keys = page_size if block_table is None else page_size * block_table.shape[1]
    out = torch.empty((batch, heads, num_queries, value_dim), dtype=path.output, device=q.device)
    lse = torch.empty((batch, heads, num_queries), dtype=torch.float32, device=q.device)
    if lse.numel() == 0:
        return out, lse
    group = heads // kv_heads
    tile = tile or decode_tile(
        q.device.type, q.element_size(), head_dim, value_dim, num_queries * group, num_keys
    )
    num_tiles = triton.cdiv(num_queries * group, tile.block_m)
    splits = num_splits or default_splits(q.device, batch * kv_heads * num_tiles, num_keys, tile.block_n)
    acc = torch.empty((splits, *out.shape), dtype=torch.float32, device=q.device)
    top, row_sum = (torch.empty((splits, *lse.shape), dtype=torch.float32, device=q.device) for _ in range(2))
    smallest = path.smallest_dim()
    band = {"HAS_LEFT": options.left is not None, "HAS_RIGHT": options.right is not None}
    left, right = options.left or 0, options.right or 0
    with device_of(q):
        _decode_kernel[(splits * num_tiles * batch * kv_heads,)](
            *with_strides(q, k, v, acc, top, row_sum, block_table),
            options.key_lengths,
            num_tiles,
            splits,
            kv_heads,
            group,
            num_queries,
            num_keys,
            page_size,
            options.sigma,
            options.score_factor,
            options.cap,
            left,
            right,
            D=head_dim,
            DV=value_dim,
            BLOCK_M=tile.block_m,
            BLOCK_N=tile.block_n,
            BLOCK_D=padded(head_dim, smallest),
            BLOCK_DV=padded(value_dim, smallest),
            PLAIN=options.plain,
            SOFTCAP=options.softcap,
            NEGATIVE=options.sigma < 0,
            SUBTRACT_FIRST=path.subtract_first,
            PRECISION="ieee" if path.operand == "fp32" else "tf32",
            FORMAT=path.operand,
            P_SCALE=path.probability_scale,
            PROMOTE=path.promote,
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
            **band,
        )
        merge_tiles = triton.cdiv(num_queries, _MERGED_ROWS)
        _merge_kernel[(merge_tiles * batch * heads,)](
            *with_strides(acc, top, row_sum, out, lse),
            options.sink,
            options.key_lengths,
            merge_tiles,
            splits,
            heads,
            num_queries,
            num_keys,
            left,
            right,
            DV=value_dim,
            BLOCK_M=_MERGED_ROWS,
            BLOCK_DV=padded(value_dim),
            P_SCALE=path.probability_scale,
            **band,
        )
    return out, lse


def default_splits(device: torch.device, programs: int, num_keys: int, block_n: int) -> int:
    """Shares of the keys that fill the device twice, at most one a tile of keys."""
    processors = 132
    if device.type == "cuda":
        processors = torch.cuda.get_device_properties(device).multi_processor_count
    return max(1, min(-(-2 * processors // programs), -(-num_keys // block_n), MOST_SPLITS))
