"""Ranges of keys and queries in the order in which they are visited."""

from __future__ import annotations

from dataclasses import replace

from flashcheck.arithmetic import Arithmetic

DEFAULT_TILE = 64


def concrete(arithmetic: Arithmetic) -> Arithmetic:
    """``arithmetic`` with what it leaves open about tiles decided: 64 keys and queries, ascending."""
    return replace(
        arithmetic,
        block_keys=arithmetic.block_keys or DEFAULT_TILE,
        block_queries=arithmetic.block_queries or DEFAULT_TILE,
        order="ascending" if arithmetic.order == "unknown" else arithmetic.order,
    )


def ranges(length: int, block: int) -> list[slice]:
    """Consecutive ranges of ``block`` that cover ``length``; the last may be shorter."""
    return [slice(first, min(first + block, length)) for first in range(0, length, block)]


def key_tiles(num_keys: int, arithmetic: Arithmetic) -> list[list[slice]]:
    """Key tiles of each split, in the order of their visit; splits share the tiles out evenly."""
    tiles = ranges(num_keys, arithmetic.block_keys or DEFAULT_TILE)
    share = max(1, -(-len(tiles) // arithmetic.splits))
    parts = [tiles[i : i + share] for i in range(0, len(tiles), share)] or [[]]
    return [part[::-1] if arithmetic.order == "descending" else part for part in parts]
