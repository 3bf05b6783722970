"""Which keys a query sees: the predicate, and the tile ranges that follow from it. One place for all passes.

A band of keys surrounds the diagonal: query i is aligned with key ``i + shift``, where shift is 0 (top
left) or Nk - Nq (bottom right), and sees keys from ``left`` before it to ``right`` after it. Causality
is a band with right = 0. An unlimited side is absent at compile time (HAS_LEFT, HAS_RIGHT).
"""

import triton
import triton.language as tl


@triton.jit
def band_sees(
    o_i, o_j, n_queries, key_limit, shift, left, right, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr
):
    """True where query o_i sees key o_j; both are index blocks that broadcast against each other.

    Rows past n_queries and keys past key_limit are never seen, so that tails need no second mask.
    """
    m_seen = (o_i < n_queries) & (o_j < key_limit)
    if HAS_LEFT:
        m_seen = m_seen & (o_j >= o_i + shift - left)
    if HAS_RIGHT:
        m_seen = m_seen & (o_j <= o_i + shift + right)
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
    whole,
    shift,
    before,
    after,
    HAS_BEFORE: tl.constexpr,
    HAS_AFTER: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Where to walk along the other axis, for rows first..last (both included) of this one.

    Row r meets columns r + shift - before .. r + shift + after within [0, limit). For a tile of queries
    the columns are keys, (before, after) = (left, right) and shift is the mask's; for a tile of keys the
    columns are queries, the sides change places and shift changes sign.

    Args:
        whole: False where no tile may go unmasked (this tile's own tail is not inside).

    Returns:
        start, full_start, full_stop, stop: every met column lies in [start, stop); in
        [full_start, full_stop) whole tiles are met by all rows, so that they need no mask. All but
        ``stop`` are multiples of BLOCK.
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
    if not whole:
        full_stop = full_stop * 0
    # With no full tile, everything is walked in the first, masked stretch.
    if full_stop <= full_start:
        full_start = (stop + BLOCK - 1) // BLOCK * BLOCK
        full_stop = full_start
    return start, full_start, full_stop, stop
