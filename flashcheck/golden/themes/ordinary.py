"""Ordinary values in every format, and grouped heads."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from flashcheck.golden.draw import Draw
from flashcheck.golden.entry import FORMATS, Entry, Sizes, entry, group


def normals(key: str, sizes: Sizes) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v near N(0, 1)."""
    draw = Draw(key)
    return draw.normal(*sizes.q), draw.normal(*sizes.k), draw.normal(*sizes.v)


SIZES = {
    "4x4": Sizes(4, 4, 4),
    "5x7": Sizes(5, 7, 8),
    "1x16": Sizes(1, 16, 16),
    "16x1": Sizes(16, 1, 8),
    "8x8-d64": Sizes(3, 8, 64),
    "2x9-dv": Sizes(2, 9, 8, 4),
    "dim1": Sizes(4, 6, 1),
    "batch": Sizes(3, 5, 4, heads=2, kv_heads=2, batch=2),
}


@group("ordinary", "N(0, 1) values, no option: the first thing to run")
def ordinary() -> Iterator[Entry]:
    for fmt in FORMATS:
        for label, sizes in SIZES.items():
            name = f"ordinary.{fmt}.{label}"
            yield entry(name, fmt, normals(name, sizes), "Plain attention.", "Ordinary")


@group(
    "grouped", "fewer key/value heads than query heads; the group differs from the number of key/value heads"
)
def grouped() -> Iterator[Entry]:
    for fmt in FORMATS:
        for heads, kv_heads in ((2, 1), (3, 1), (6, 2), (6, 3), (8, 2)):
            name = f"grouped.{fmt}.{heads}-{kv_heads}"
            sizes = Sizes(3, 4, 4, heads=heads, kv_heads=kv_heads)
            purpose = (
                f"Query head h reads key/value head h // {heads // kv_heads}; dK and dV sum over the group."
            )
            yield entry(name, fmt, normals(name, sizes), purpose, "Ordinary")
