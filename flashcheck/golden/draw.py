"""Reproducible values: integers of Python's Mersenne Twister, and operations that every machine rounds alike.

``random.Random(int).getrandbits`` is the same in every Python; torch's generators are not the same in every
release. Elementwise +, -, * and / of float64 are IEEE; nothing here sums in an order of somebody's choice.
"""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Sequence
from typing import TypeVar

import torch
from torch import Tensor

from flashcheck.formats import Format, round_nearest

Choice = TypeVar("Choice")


class Draw:
    """Values that follow from a text, the key.

    Tensors are float64 multiples of 2^-16 unless said otherwise.
    """

    def __init__(self, key: str) -> None:
        digest = hashlib.sha256(key.encode()).digest()
        self._random = random.Random(int.from_bytes(digest[:8], "big"))

    def normal(self, *shape: int) -> Tensor:
        """Near N(0, 1): sums of twelve uniform numbers (Irwin and Hall), |x| <= 6."""
        count = math.prod(shape)
        sums = [sum(self._random.getrandbits(16) for _ in range(12)) - 6 * 65535 for _ in range(count)]
        return torch.tensor(sums, dtype=torch.float64).reshape(shape) / 65536.0

    def integers(self, low: int, high: int, *shape: int) -> Tensor:
        """Integers low..high, as float64."""
        count = math.prod(shape)
        values = [low + self._random.getrandbits(32) % (high - low + 1) for _ in range(count)]
        return torch.tensor(values, dtype=torch.float64).reshape(shape)

    def booleans(self, *shape: int) -> Tensor:
        """Fair coins, torch.bool."""
        return self.integers(0, 1, *shape) > 0

    def one_of(self, choices: Sequence[Choice]) -> Choice:
        """One of them."""
        return choices[self._random.getrandbits(32) % len(choices)]


def stored(x: Tensor, fmt: Format) -> Tensor:
    """float64 ``x`` rounded to nearest into a tensor of the format; saturated, never infinite."""
    return round_nearest(x.clamp(-fmt.max_finite, fmt.max_finite), fmt).to(fmt.dtype)
