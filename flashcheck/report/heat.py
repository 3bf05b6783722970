"""Heat maps as tiny PNGs inside an SVG frame: a cell is a pixel, the browser enlarges it."""

from __future__ import annotations

import base64
import math
import struct
import zlib
from collections.abc import Sequence

# From light to dark, read on white and on black alike (a sequential map of one hue per third).
_STOPS = ((0xEA, 0xF2, 0xF8), (0x9E, 0xC5, 0xDE), (0x3F, 0x86, 0xB8), (0x1F, 0x3F, 0x7A), (0x20, 0x10, 0x3A))
_OVER = (0xD6, 0x27, 0x28)
_NONE = (0xFF, 0xFF, 0xFF)

SIZE = 190
LEFT, TOP = 44, 8


def colour(share: float) -> tuple[int, int, int]:
    """RGB of a value in 0..1; red above 1, white for exactly 0."""
    if math.isnan(share) or share > 1:
        return _OVER
    if share == 0:
        return _NONE
    place = share * (len(_STOPS) - 1)
    n = min(int(place), len(_STOPS) - 2)
    pairs = zip(_STOPS[n], _STOPS[n + 1], strict=True)
    r, g, b = (round(a + (c - a) * (place - n)) for a, c in pairs)
    return r, g, b


def png(rows: Sequence[Sequence[tuple[int, int, int]]]) -> bytes:
    """An 8-bit RGB PNG."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        check = struct.pack(">I", zlib.crc32(kind + data))
        return struct.pack(">I", len(data)) + kind + data + check

    raw = b"".join(b"\0" + b"".join(bytes(cell) for cell in row) for row in rows)
    header = struct.pack(">IIBBBBB", len(rows[0]), len(rows), 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + chunk(b"IDAT", zlib.compress(raw, 9))
        + chunk(b"IEND", b"")
    )


def heat_map(
    values: Sequence[Sequence[float]],
    top: float,
    size: tuple[int, int],
    labels: tuple[str, str],
    worst: tuple[int, int | None],
    alt: str,
) -> str:
    """An SVG; ``top`` is the value of the darkest colour, ``size`` the matrix before thinning.

    ``worst`` marks an element of the whole matrix: a ring, or a stripe where only its row is given.
    """
    cells = [[colour(v / top if top else 0.0) for v in row] for row in values]
    data = base64.b64encode(png(cells)).decode()
    down, across = SIZE / size[0], SIZE / size[1]
    y = TOP + (worst[0] + 0.5) * down
    if worst[1] is None:
        mark = f'<path class="here" d="M{LEFT - 6} {y:.1f}h{SIZE + 12}"/>'
    else:
        mark = f'<circle class="here" cx="{LEFT + (worst[1] + 0.5) * across:.1f}" cy="{y:.1f}" r="6"/>'
    end, low = LEFT + SIZE, TOP + SIZE
    return (
        f'<svg class="heat" viewBox="0 0 {end + 12} {low + 38}" role="img" aria-label="{alt}">'
        f'<image href="data:image/png;base64,{data}" x="{LEFT}" y="{TOP}" width="{SIZE}" height="{SIZE}" '
        f'preserveAspectRatio="none"/><rect class="edge" x="{LEFT}" y="{TOP}" width="{SIZE}" '
        f'height="{SIZE}"/>{mark}'
        f'<text x="{LEFT - 5}" y="{TOP + 10}" text-anchor="end">0</text>'
        f'<text x="{LEFT - 5}" y="{low}" text-anchor="end">{size[0] - 1}</text>'
        f'<text x="{LEFT}" y="{low + 15}" text-anchor="middle">0</text>'
        f'<text x="{end}" y="{low + 15}" text-anchor="end">{size[1] - 1}</text>'
        f'<text class="label" x="{LEFT + SIZE / 2}" y="{low + 30}" text-anchor="middle">{labels[1]}</text>'
        f'<text class="label" transform="translate(12 {TOP + SIZE / 2}) rotate(-90)" '
        f'text-anchor="middle">{labels[0]}</text></svg>'
    )
