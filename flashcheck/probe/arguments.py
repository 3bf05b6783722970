"""fp32 arguments: all 2^32 of them, or a stratified sample."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

_CHUNK = 1 << 26
_BINADES = 512  # sign and exponent field


@dataclass(frozen=True, slots=True)
class Arguments:
    """Which arguments a function is tested on.

    Attributes:
        per_binade: significands for each sign and exponent (a power of two, at least 16); None: all 2^23.
    """

    per_binade: int | None

    @property
    def count(self) -> int:
        return _BINADES * (self.per_binade or 1 << 23)

    @property
    def exhaustive(self) -> bool:
        return self.per_binade is None

    def chunks(self, device: torch.device) -> Iterator[Tensor]:
        """float32 vectors on ``device``, each a multiple of 1024 long. Zeros, subnormals, infinities and NaN
        are among them."""
        if self.per_binade is None:
            for start in range(-(1 << 31), 1 << 31, _CHUNK):
                codes = torch.arange(start, start + _CHUNK, device=device)
                yield codes.to(torch.int32).view(torch.float32)
            return
        yield self._sample().to(torch.int32).view(torch.float32).to(device)

    def _sample(self) -> Tensor:
        """Codes: the ends, the middle and ties of every binade, and significands drawn at random."""
        assert self.per_binade is not None
        generator = torch.Generator().manual_seed(23)
        significands = torch.randint(1 << 23, (_BINADES, self.per_binade), generator=generator)
        # Around the rounding boundaries of bf16 (16 bits below), fp16 (13), e4m3 (20) and e5m2 (21).
        corners = [0, 1, (1 << 23) - 1, 1 << 22]
        for dropped in (13, 16, 20, 21):
            half = 1 << (dropped - 1)
            corners += [half, 3 * half, (1 << 23) - half]
        significands[:, : len(corners)] = torch.tensor(corners)
        return ((torch.arange(_BINADES).unsqueeze(-1) << 23) + significands).flatten()
