"""The grid of problems that is timed, and its counts of operations, in the papers' convention."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

TOKENS = 16384  # batch * length
WIDTH = 2048  # heads * head dim


@dataclass(frozen=True, slots=True)
class Size:
    """A self-attention problem: as many keys as queries, every head its own keys."""

    batch: int
    heads: int
    length: int
    head_dim: int
    causal: bool

    @property
    def label(self) -> str:
        return f"d={self.head_dim} n={self.length}{' causal' if self.causal else ''}"

    def operations(self, backward: bool) -> float:
        """Floating-point operations: 4 B H N^2 D forward, 2.5 times that backward; half where causal."""
        forward = 4.0 * self.batch * self.heads * self.length**2 * self.head_dim
        return forward * (2.5 if backward else 1.0) * (0.5 if self.causal else 1.0)

    def tensors(self, device: str, count: int = 3, seed: int = 0) -> list[Tensor]:
        """``count`` standard normal bf16 tensors (batch, heads, length, dim); uninitialised on "meta"."""
        shape = (self.batch, self.heads, self.length, self.head_dim)
        if seed < 0:
            return [torch.empty(shape, dtype=torch.bfloat16, device=device) for _ in range(count)]
        generator = torch.Generator(device).manual_seed(seed)
        return [
            torch.randn(shape, generator=generator, dtype=torch.bfloat16, device=device) for _ in range(count)
        ]


def size(head_dim: int, length: int, causal: bool, tokens: int = TOKENS, width: int = WIDTH) -> Size:
    """The problem of that length which holds ``tokens`` tokens of ``width`` channels."""
    return Size(max(1, tokens // length), max(1, width // head_dim), length, head_dim, causal)
