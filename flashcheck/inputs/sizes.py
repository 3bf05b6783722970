"""The sizes and scale that a value family has to know."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flashcheck.formats import Format


@dataclass(frozen=True, slots=True)
class Sizes:
    """Shapes of q, k, v, the scale that will multiply q . k, and the format they are stored in."""

    batch: int
    num_heads: int
    num_kv_heads: int
    num_queries: int
    num_keys: int
    head_dim: int
    value_dim: int
    scale: float
    format: Format

    @property
    def q_shape(self) -> tuple[int, ...]:
        return (self.batch, self.num_heads, self.num_queries, self.head_dim)

    @property
    def k_shape(self) -> tuple[int, ...]:
        return (self.batch, self.num_kv_heads, self.num_keys, self.head_dim)

    @property
    def v_shape(self) -> tuple[int, ...]:
        return (self.batch, self.num_kv_heads, self.num_keys, self.value_dim)


class Draw:
    """Deterministic float64 random tensors from one generator."""

    def __init__(self, sizes: Sizes, generator: torch.Generator) -> None:
        self.sizes = sizes
        self.generator = generator

    def normal(self, shape: tuple[int, ...]) -> Tensor:
        """N(0, 1)."""
        return torch.randn(shape, generator=self.generator, dtype=torch.float64)

    def uniform(self, shape: tuple[int, ...]) -> Tensor:
        """Uniform on [-1, 1)."""
        return 2.0 * torch.rand(shape, generator=self.generator, dtype=torch.float64) - 1.0

    def integers(self, shape: tuple[int, ...], low: int, high: int) -> Tensor:
        """Integers low..high, both ends included."""
        drawn = torch.randint(low, high + 1, shape, generator=self.generator)
        return drawn.double()

    def happens(self, shape: tuple[int, ...], probability: float) -> Tensor:
        """Boolean, true with the given probability."""
        return torch.rand(shape, generator=self.generator, dtype=torch.float64) < probability

    def one_of(self, choices: tuple[float, ...]) -> float:
        """One of the choices."""
        return choices[int(torch.randint(len(choices), (), generator=self.generator))]

    def sign(self) -> float:
        """+1 or -1."""
        return self.one_of((1.0, -1.0))

    def normals(self) -> tuple[Tensor, Tensor, Tensor]:
        """N(0, 1) for q, k and v."""
        return (
            self.normal(self.sizes.q_shape),
            self.normal(self.sizes.k_shape),
            self.normal(self.sizes.v_shape),
        )
