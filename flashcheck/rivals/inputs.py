"""What the suites draw: their distributions, each with the options that a thorough suite would turn on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from flashcheck.problem import Problem

HEADS, KV_HEADS, DIM = 4, 2, 64


def _sparse_integers(shape: tuple[int, ...], g: torch.Generator) -> Tensor:
    x = torch.randint(-2, 3, shape, generator=g).double()
    return x * (torch.rand(shape, generator=g) < 0.2)


DISTRIBUTIONS: dict[str, Callable[[tuple[int, ...], torch.Generator], Tensor]] = {
    "normal": lambda shape, g: torch.randn(shape, generator=g, dtype=torch.float64),
    "uniform": lambda shape, g: torch.rand(shape, generator=g, dtype=torch.float64),
    "normal x 3": lambda shape, g: 3 * torch.randn(shape, generator=g, dtype=torch.float64),
    "normal x 0.1": lambda shape, g: 0.1 * torch.randn(shape, generator=g, dtype=torch.float64),
    "sparse integers": _sparse_integers,
}
"""By the names that ``Rule.inputs`` uses."""


def problems(distribution: str, dtype: torch.dtype) -> Iterator[Problem]:
    """One problem per group of options, so that every mutant's option is on in one of them."""
    draw = DISTRIBUTIONS[distribution]
    g = torch.Generator().manual_seed(1)
    for num_queries, num_keys, options in _option_groups(g):
        q, dout = (draw((1, HEADS, num_queries, DIM), g).to(dtype) for _ in range(2))
        k, v = (draw((1, KV_HEADS, num_keys, DIM), g).to(dtype) for _ in range(2))
        yield Problem(q, k, v, dout=dout, family=distribution, **options)


def _option_groups(g: torch.Generator) -> list[tuple[int, int, dict[str, Any]]]:
    mask = torch.rand((1, HEADS, 100, 90), generator=g) > 0.3
    mask[..., 0] = True
    bias = torch.randn((1, HEADS, 97, 97), generator=g)
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625])
    segments = torch.tensor([0, 40, 41, 110], dtype=torch.int32)
    return [
        (128, 128, {}),
        (128, 128, {"causal": "top_left"}),
        (65, 113, {"causal": "bottom_right"}),
        (113, 113, {"causal": "bottom_right", "window": (17, None)}),
        (100, 90, {"mask": mask}),
        (97, 97, {"bias": bias}),
        (96, 96, {"softcap": 10.0, "alibi_slopes": slopes}),
        (64, 100, {"key_lengths": torch.tensor([71]), "sink": torch.tensor([0.5, -1.0, 2.0, 0.0])}),
        (110, 110, {"cu_seqlens_q": segments, "cu_seqlens_k": segments, "causal": "top_left"}),
    ]
