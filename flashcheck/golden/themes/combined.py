"""Options together, drawn at random."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from flashcheck.golden.draw import Draw
from flashcheck.golden.entry import FORMATS, Entry, Sizes, entry, group
from flashcheck.golden.themes.ordinary import normals

COUNT = 20


@group("combined", "several options at once")
def combined() -> Iterator[Entry]:
    for fmt in FORMATS:
        for n in range(COUNT):
            name = f"combined.{fmt}.{n:02}"
            sizes, options = _drawn(Draw(f"{name}/options"))
            purpose = f"{', '.join(sorted(options)) or 'no option'}."
            yield entry(name, fmt, normals(name, sizes), purpose, **options)


def _drawn(draw: Draw) -> tuple[Sizes, dict[str, Any]]:
    heads, kv_heads = draw.one_of(((1, 1), (2, 1), (2, 2)))
    sizes = Sizes(
        draw.one_of((1, 3, 6)),
        draw.one_of((2, 5, 9)),
        draw.one_of((4, 8)),
        draw.one_of((0, 0, 4)),
        heads,
        kv_heads,
        draw.one_of((1, 1, 2)),
    )
    options: dict[str, Any] = {}

    def sometimes() -> bool:
        return draw.one_of((True, False, False))

    if sometimes():
        options["scale"] = draw.one_of((0.25, 1.0, -0.5))
    if sometimes():
        options["causal"] = draw.one_of(("top_left", "bottom_right"))
    if sometimes():
        options["window"] = draw.one_of(((2, 1), (None, 0), (3, None)))
    if sometimes():
        options["mask"] = draw.booleans(1, heads, sizes.nq, sizes.nk)
    if sometimes():
        options["bias"] = draw.normal(sizes.batch, 1, sizes.nq, sizes.nk)
    if sometimes():
        options["alibi_slopes"] = draw.normal(heads).abs()
    if sometimes():
        options["softcap"] = draw.one_of((0.5, 3.0))
    if sometimes():
        options["sink"] = draw.normal(heads)
    if sometimes():
        options["key_lengths"] = draw.integers(0, sizes.nk, sizes.batch).to(torch.int64)
    if sometimes():
        options["dlse"] = draw.normal(sizes.batch, heads, sizes.nq)
    if sometimes():
        options["v_descale"] = 0.375
    return sizes, options
