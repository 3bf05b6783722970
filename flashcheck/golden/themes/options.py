"""Every option of the contract by itself."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from flashcheck.golden.draw import Draw
from flashcheck.golden.entry import FORMATS, Entry, Sizes, entry, group
from flashcheck.golden.themes.ordinary import normals

_TWO = Sizes(5, 7, 4, heads=2, kv_heads=2)


def variants(key: str) -> Iterator[tuple[str, str, Sizes, dict[str, Any]]]:
    """(label, purpose, sizes, options of ``Problem``)."""
    draw = Draw(f"{key}/options")
    for value in (1.0, 0.0, -0.125, 3.0):
        yield f"scale{value:g}", "Scale may be any finite number.", Sizes(), {"scale": value}
    for alignment in ("top_left", "bottom_right"):
        for nq, nk in ((6, 6), (4, 7), (7, 4)):
            label = f"{alignment}-{nq}x{nk}"
            yield label, "Causal: the diagonal's end matters.", Sizes(nq, nk, 4), {"causal": alignment}
    for left, right in ((0, 0), (2, 0), (None, 1), (1, None)):
        options: dict[str, Any] = {"window": (left, right)}
        yield (
            f"window-{left}-{right}",
            "Window counted from the bottom-right diagonal.",
            Sizes(5, 8, 4),
            options,
        )
    options = {"window": (2, 1), "causal": "top_left"}
    yield "window-causal", "Window counted from the causal diagonal.", Sizes(5, 8, 4), options
    for label, shape in (("full", _TWO.pairs), ("rows", (1, 1, 5, 7)), ("keys", (1, 1, 1, 7))):
        mask = draw.booleans(*shape)
        mask[..., 0] = True
        yield f"mask-{label}", "Boolean mask, broadcast.", _TWO, {"mask": mask}
    for label, shape in (
        ("full", _TWO.pairs),
        ("heads", (1, 2, 5, 7)),
        ("keys", (1, 1, 1, 7)),
        ("q", (1, 1, 5, 1)),
    ):
        bias = draw.normal(*shape)
        yield (
            f"bias-{label}",
            "Bias added to the scaled score; its gradient sums over broadcasts.",
            _TWO,
            {"bias": bias},
        )
    slopes = torch.tensor([0.5, 0.0625], dtype=torch.float64)
    yield "alibi", "ALiBi: minus slope times the distance to the diagonal.", _TWO, {"alibi_slopes": slopes}
    for cap in (1.0, 15.0):
        options = {"softcap": cap, "scale": 4.0 / cap}
        yield (
            f"softcap{cap:g}",
            "Scores bend at the cap; the backward has its derivative.",
            Sizes(4, 6, 8),
            options,
        )
    yield "sink", "The sink takes its share of the denominator.", _TWO, {"sink": draw.normal(2)}
    options = {"sink": torch.tensor([50.0, -50.0], dtype=torch.float64)}
    yield "sink-extreme", "A sink that takes everything, and one that takes nothing.", _TWO, options
    lengths = Sizes(3, 6, 4, batch=2)
    yield "key_lengths", "Keys past the length are padding.", lengths, {"key_lengths": torch.tensor([6, 3])}
    ends = {"cu_seqlens_q": torch.tensor([0, 2, 2, 7]), "cu_seqlens_k": torch.tensor([0, 3, 4, 9])}
    yield "packed", "Packed sequences, one of them without queries.", Sizes(7, 9, 4), ends
    yield (
        "packed-causal",
        "Causal inside each packed sequence.",
        Sizes(7, 9, 4),
        {**ends, "causal": "bottom_right"},
    )
    options = {"q_descale": 0.5, "k_descale": 0.75, "v_descale": 3.0}
    yield "descale", "Stored values stand for value * descale.", Sizes(), options
    yield "dlse", "The log-sum-exp has a gradient of its own.", Sizes(), {"dlse": draw.normal(1, 1, 5)}


@group("options", "every option of the contract by itself")
def options() -> Iterator[Entry]:
    for fmt in FORMATS:
        for label, purpose, sizes, chosen in variants(f"options.{fmt}"):
            name = f"options.{fmt}.{label}"
            yield entry(name, fmt, normals(name, sizes), purpose, **chosen)
