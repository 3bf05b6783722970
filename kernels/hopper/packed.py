"""Packed segments: which one a program works on, found on the device: the host need not know a length.

Tiles are numbered in slots: segment s owns the slots from ``cu[s] // BLOCK + s`` on, which is room for all
its tiles wherever it starts. There are ``total // BLOCK + segments`` slots; those past a segment's last tile
are empty. Descriptors cover the whole packed tensors: a segment's last tile also reads rows of the next one.
"""

import triton
import triton.language as tl

from kernels.masking import part_of_range

_CHUNK = tl.constexpr(64)


def slots(total: int, segments: int, block: int) -> int:
    """How many slots hold the tiles of segments that have ``total`` rows together, however they divide."""
    return total // block + segments


@triton.jit
def segment_of(i_slot, n_segments, p_cu, BLOCK: tl.constexpr):
    """The segment that owns a slot, and the tile's number in it (past its end where the slot is empty)."""
    i_segment = -1
    for i_chunk in tl.range(0, n_segments, _CHUNK, num_stages=1):
        o_s = i_chunk + tl.arange(0, _CHUNK)
        first = tl.load(p_cu + o_s, mask=o_s < n_segments, other=0).to(tl.int32) // BLOCK + o_s
        i_segment += tl.sum(((o_s < n_segments) & (first <= i_slot)).to(tl.int32), 0)
    i_segment = tl.maximum(i_segment, 0)
    return i_segment, i_slot - (tl.load(p_cu + i_segment).to(tl.int32) // BLOCK + i_segment)


@triton.jit
def bounds(i_segment, p_cu, total):
    """First row and length of a segment; never outside of the tensor, whatever ``p_cu`` holds."""
    start = tl.minimum(tl.maximum(tl.load(p_cu + i_segment).to(tl.int32), 0), total)
    stop = tl.minimum(tl.load(p_cu + i_segment + 1).to(tl.int32), total)
    return start, tl.maximum(stop - start, 0)


@triton.jit
def placed(
    i_t,
    n_queries,
    n_keys,
    p_cu_q,
    p_cu_k,
    n_segments,
    BY_KEYS: tl.constexpr,
    BLOCK: tl.constexpr,
    PACKED: tl.constexpr,
):
    """Where tile (or slot) ``i_t`` of the queries, or of the keys where BY_KEYS, lies.

    Returns:
        the tile's first row in its batch or segment, past the end where a slot is empty; the segment's first
        query and key in the tensors; how many it has of each.
    """
    q_start = 0
    k_start = 0
    if PACKED:
        i_s, i_t = segment_of(i_t, n_segments, p_cu_k if BY_KEYS else p_cu_q, BLOCK)
        q_start, n_queries = bounds(i_s, p_cu_q, n_queries)
        k_start, n_keys = bounds(i_s, p_cu_k, n_keys)
    return i_t * BLOCK, q_start, k_start, n_queries, n_keys


@triton.jit
def part_of_rows(
    I_PART: tl.constexpr,
    start,
    full_start,
    full_stop,
    stop,
    n_rows,
    BLOCK: tl.constexpr,
    PACKED: tl.constexpr,
):
    """`kernels.masking.part_of_range`; the tile that meets a packed segment's end is a part of its own, 3.

    The tiles before the full ones lie inside the segment: where there are no full ones, all is after them.
    """
    part_start, part_stop = part_of_range(I_PART, start, full_start, full_stop, stop)
    if PACKED:
        whole = n_rows // BLOCK * BLOCK
        if I_PART == 2:
            part_stop = tl.minimum(part_stop, whole)
        if I_PART == 3:
            part_start = tl.maximum(part_start, whole)
    return part_start, part_stop


@triton.jit
def masked_rows(
    p, stride, start, o_row, n_rows, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_D2: tl.constexpr
):
    """Rows ``o_row`` of a segment that starts at ``start``; zero past its end, where others may hold NaN.

    Both parts of the head dim (`kernels.hopper.halves`).
    """
    p += (start + o_row).to(tl.int64)[:, None] * stride
    m_row = (o_row < n_rows)[:, None]
    o_d = tl.arange(0, BLOCK_D)[None, :]
    b_x = tl.load(p + o_d, mask=m_row & (o_d < D), other=0.0)
    b_x2 = 0
    if BLOCK_D2 > 0:
        o_d2 = BLOCK_D + tl.arange(0, BLOCK_D2)[None, :]
        b_x2 = tl.load(p + o_d2, mask=m_row & (o_d2 < D), other=0.0)
    return b_x, b_x2
