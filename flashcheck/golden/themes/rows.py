"""Rows that see nothing, one key, or data that is not finite."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from flashcheck.formats import E4M3, Format
from flashcheck.golden.draw import Draw, stored
from flashcheck.golden.entry import FORMATS, Entry, Sizes, entry, group
from flashcheck.golden.themes.ordinary import normals


@group("empty_rows", "queries that see no key")
def empty_rows() -> Iterator[Entry]:
    for fmt in FORMATS:
        mask = torch.ones(1, 1, 5, 6, dtype=torch.bool)
        mask[:, :, ::2] = False
        nothing = torch.zeros(1, 1, 1, 1, dtype=torch.bool)
        sink = torch.tensor([0.5], dtype=torch.float64)
        cases: dict[str, tuple[Sizes, dict[str, Any]]] = {
            "mask": (Sizes(5, 6, 4), {"mask": mask}),
            "all": (Sizes(3, 4, 4), {"mask": nothing}),
            "causal": (Sizes(7, 4, 4), {"causal": "bottom_right"}),
            "sink": (Sizes(5, 6, 4), {"mask": mask, "sink": sink}),
            "lengths": (Sizes(3, 5, 4, batch=3), {"key_lengths": torch.tensor([0, 5, 1])}),
            "window": (Sizes(8, 3, 4), {"window": (1, 0), "causal": "bottom_right"}),
        }
        for label, (sizes, options) in cases.items():
            name = f"empty_rows.{fmt}.{label}"
            yield entry(
                name, fmt, normals(name, sizes), "Rows without a visible key give 0 and -inf.", **options
            )


@group("single_key", "one key, and lengths of zero")
def single_key() -> Iterator[Entry]:
    for fmt in FORMATS:
        name = f"single_key.{fmt}.one"
        purpose = "P = 1: O is the value, exactly."
        yield entry(name, fmt, normals(name, Sizes(4, 1, 8)), purpose, "SingleKey")
        name = f"single_key.{fmt}.first"
        values = normals(name, Sizes(4, 6, 8))
        mask = torch.tensor([True] + [False] * 5).view(1, 1, 1, 6)
        yield entry(name, fmt, values, "A mask leaves the first key.", "SingleKey", mask=mask)
        name = f"single_key.{fmt}.sink"
        sink = torch.tensor([1.0], dtype=torch.float64)
        yield entry(name, fmt, normals(name, Sizes(4, 1, 4)), "One key against a sink.", sink=sink)
        name = f"single_key.{fmt}.no-keys"
        yield entry(name, fmt, normals(name, Sizes(3, 0, 4)), "No key at all: O = 0, LSE = -inf.")
        name = f"single_key.{fmt}.no-queries"
        yield entry(name, fmt, normals(name, Sizes(0, 3, 4)), "No query: dK = dV = 0.")


def _planted(key: str, fmt: Format, tensor: str, value: float, place: tuple[int, ...]) -> tuple[Tensor, ...]:
    """q, k, v in the format, positive q and k, with ``value`` planted into one of them."""
    draw = Draw(key)
    sizes = Sizes(4, 5, 4)
    values = {
        "q": stored(draw.normal(*sizes.q).abs() + 0.5, fmt),
        "k": stored(draw.normal(*sizes.k).abs() + 0.5, fmt),
        "v": stored(draw.normal(*sizes.v), fmt),
    }
    codes = values[tensor].double()
    codes[place] = value
    values[tensor] = codes.to(fmt.dtype)
    return values["q"], values["k"], values["v"]


@group(
    "nonfinite",
    "NaN and inf: in visible data they reach the rows that see them, elsewhere they do not matter",
)
def nonfinite() -> Iterator[Entry]:
    legal = (
        "Where NaN is expected inf is legal too, and NaN where inf is expected: kernels form inf - inf.",
    )
    inf, nan = torch.inf, torch.nan
    for fmt in FORMATS:
        plants = {
            "nan-q": ("q", nan, (0, 0, 1, 2)),
            "nan-k": ("k", nan, (0, 0, 2, 1)),
            "nan-v": ("v", nan, (0, 0, 3, 1)),
        }
        if fmt is not E4M3:  # e4m3 has no infinity
            plants |= {"inf-v": ("v", inf, (0, 0, 1, 0)), "-inf-v": ("v", -inf, (0, 0, 0, 3))}
        for label, (tensor, value, place) in plants.items():
            name = f"nonfinite.{fmt}.{label}"
            q, k, v = _planted(name, fmt, tensor, value, place)
            # A value that a mask hides from some row must be finite (contract, point 6).
            causal = None if tensor == "v" else "top_left"
            purpose = f"{value} in {tensor}" + (", seen by every row." if tensor == "v" else "; causal.")
            yield entry(
                name, fmt, (q, k, v), purpose, "NonFinite", backward=False, causal=causal, notes=legal
            )
        name = f"nonfinite.{fmt}.padding"
        q, k, v = _planted(name, fmt, "v", nan, (0, 0, 4, 1))
        k = torch.cat([k[:, :, :4], torch.full_like(k[:, :, 4:].double(), nan).to(fmt.dtype)], 2)
        purpose = "NaN past the key length: padding must not matter."
        yield entry(name, fmt, (q, k, v), purpose, "Poison", key_lengths=torch.tensor([4]))
