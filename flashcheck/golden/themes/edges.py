"""Lengths at the edges of tiles."""

from __future__ import annotations

from collections.abc import Iterator

from flashcheck.formats import BF16, FP16
from flashcheck.golden.entry import FORMATS, Entry, Sizes, entry, group
from flashcheck.golden.themes.ordinary import normals

LENGTHS = (15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129)


@group("tile_edges", "lengths at, just under and just over multiples of 16, 32, 64 and 128")
def tile_edges() -> Iterator[Entry]:
    for fmt in FORMATS:
        for n in LENGTHS:
            name = f"tile_edges.{fmt}.keys-{n}"
            purpose = "The last tile of keys is ragged, full, or holds one key."
            yield entry(name, fmt, normals(name, Sizes(2, n, 4)), purpose, "TileEdge")
    for n in LENGTHS:
        name = f"tile_edges.bf16.queries-{n}"
        purpose = "The last tile of queries is ragged, full, or holds one query."
        yield entry(name, BF16, normals(name, Sizes(n, 3, 4)), purpose, "TileEdge")
        name = f"tile_edges.fp16.causal-{n}"
        sizes = Sizes(3, n, 4)
        purpose = "Bottom-right causal: the ragged diagonal tile."
        yield entry(name, FP16, normals(name, sizes), purpose, "TileEdge", causal="bottom_right")
    for n in (17, 33):
        name = f"tile_edges.bf16.square-{n}"
        yield entry(
            name,
            BF16,
            normals(name, Sizes(n, n, 4)),
            "Square causal over two tiles.",
            "TileEdge",
            causal="top_left",
        )
