"""Which keys a query sees: the predicate, and the tile ranges that follow from it. One place for all passes.

A band of keys surrounds the diagonal: query i is aligned with key ``i + shift``, where shift is 0 (top
left) or Nk - Nq (bottom right), and sees keys from ``left`` before it to ``right`` after it. Causality
is a band with right = 0. An unlimited side is absent at compile time (HAS_LEFT, HAS_RIGHT). In packed
batches all indices and lengths are those of the segment.
"""

import triton
import triton.language as tl


@triton.jit
def segment(i_b, n_queries, n_keys, p_key_lengths, p_cu_q, p_cu_k, BOTTOM_RIGHT: tl.constexpr):
    """Where batch (or packed segment) i_b lies, and how far its keys and its diagonal reach.

    Returns:
        i_batch: batch index into the tensors (0 where segments are packed into one batch);
        q_start, k_start: 64-bit first rows; n_queries, n_keys: its lengths; key_limit: keys that are
        not padding; shift: the mask's diagonal; offset: ALiBi's diagonal, always bottom right.
    """
    i_batch = i_b.to(tl.int64)
    q_start = i_batch * 0
    k_start = i_batch * 0
    if p_cu_q is not None:
        q_start = tl.load(p_cu_q + i_b).to(tl.int64)
        k_start = tl.load(p_cu_k + i_b).to(tl.int64)
        n_queries = (tl.load(p_cu_q + i_b + 1) - q_start).to(tl.int32)
        n_keys = (tl.load(p_cu_k + i_b + 1) - k_start).to(tl.int32)
        i_batch = i_batch * 0
    key_limit = n_keys
    if p_key_lengths is not None:
        # Lengths count from the start of the batch, also where segments are packed into it.
        reach = (tl.load(p_key_lengths + i_batch) - k_start).to(tl.int32)
        key_limit = tl.minimum(tl.maximum(reach, 0), n_keys)
    offset = n_keys - n_queries
    shift = offset if BOTTOM_RIGHT else offset * 0
    return i_batch, q_start, k_start, n_queries, n_keys, key_limit, shift, offset


@triton.jit
def band_sees(
    o_i, o_j, n_queries, key_limit, shift, left, right, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr
):
    """True where query o_i sees key o_j; both are index blocks that broadcast against each other.

    Rows past n_queries and keys past key_limit are never seen, so that tails need no second mask.
    """
    # Limits are formed a row, so that a pair costs one comparison a side.
    o_last = tl.where(o_i < n_queries, key_limit - 1, -1)
    if HAS_RIGHT:
        o_last = tl.minimum(o_last, o_i + shift + right)
    m_seen = o_j <= o_last
    if HAS_LEFT:
        m_seen = m_seen & (o_j >= o_i + shift - left)
    return m_seen


@triton.jit
def row_sees_any(o_i, key_limit, shift, left, right, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr):
    """True where the band holds at least one key of [0, key_limit) for query o_i."""
    o_first = o_i * 0
    o_last = o_i * 0 + key_limit - 1
    if HAS_LEFT:
        o_first = tl.maximum(o_first, o_i + shift - left)
    if HAS_RIGHT:
        o_last = tl.minimum(o_last, o_i + shift + right)
    return o_first <= o_last


@triton.jit
def tile_range(
    first,
    last,
    limit,
    shift,
    before,
    after,
    HAS_BEFORE: tl.constexpr,
    HAS_AFTER: tl.constexpr,
    MASK_ALL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Where to walk along the other axis, for rows first..last (both included) of this one.

    Row r meets columns r + shift - before .. r + shift + after within [0, limit). For a tile of queries
    the columns are keys and (before, after) = (left, right); for a tile of keys the columns are queries,
    the sides change places and shift changes sign.

    Args:
        MASK_ALL: no tile may go unmasked.

    Returns:
        start, full_start, full_stop, stop: every met column lies in [start, stop); in
        [full_start, full_stop) whole tiles are met by all rows, so that they need no mask. All but
        ``stop`` are multiples of BLOCK. full_start is start where HAS_BEFORE is false.
    """
    start = limit * 0
    stop = limit
    full_start = limit * 0
    full_stop = limit
    if HAS_BEFORE:
        start = tl.maximum(start, first + shift - before)
        full_start = tl.maximum(full_start, last + shift - before)
    if HAS_AFTER:
        stop = tl.minimum(stop, last + shift + after + 1)
        full_stop = tl.minimum(full_stop, first + shift + after + 1)
    start = start // BLOCK * BLOCK
    stop = tl.maximum(stop, start)
    full_start = (full_start + BLOCK - 1) // BLOCK * BLOCK
    full_stop = tl.maximum(full_stop, 0) // BLOCK * BLOCK
    # With no full tile, everything is walked in the last, masked stretch.
    none = full_stop <= full_start
    if MASK_ALL:
        none = full_start >= 0
    full_start = tl.where(none, start, full_start)
    full_stop = tl.where(none, start, full_stop)
    return start, full_start, full_stop, stop


@triton.jit
def part_of_range(I_PART: tl.constexpr, start, full_start, full_stop, stop):
    """Where a part of `tile_range` starts and stops: 0 before the full tiles, 1 they, 2 after them."""
    part_start = start if I_PART == 0 else (full_start if I_PART == 1 else full_stop)
    part_stop = tl.minimum(full_start, stop) if I_PART == 0 else (full_stop if I_PART == 1 else stop)
    return part_start, part_stop
