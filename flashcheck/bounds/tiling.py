"""The running maximum under a declared tiling: which reference maximum each weight was taken against."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flashcheck.arithmetic import Arithmetic

SMALLEST_TILE = 16
"""Keys per tile that an undeclared tiling has at least: no matrix unit takes fewer."""


@dataclass(frozen=True, slots=True)
class Tiling:
    """Geometry of the online softmax for one problem.

    Attributes:
        rescales: upper limit of the number of rescaling steps after the first tile.
        running_max: (B, H, Nq, Nk) the running maximum when each key was weighted, where the tiling
            is declared; None where it is not.
    """

    rescales: int
    running_max: Tensor | None


def tiling_of(scores: Tensor, row_max: Tensor, arithmetic: Arithmetic) -> Tiling:
    """Tiling of a row of ``scores`` (B, H, Nq, Nk; -inf where hidden) with final maxima ``row_max``.

    Keys in tiles that precede the first visible key get the final maximum: they carry no weight.
    """
    num_keys = scores.shape[-1]
    block = arithmetic.block_keys or SMALLEST_TILE
    tiles = max(-(-num_keys // block), 1)
    rescales = 0 if arithmetic.normalise == "before_product" else tiles - 1 + (arithmetic.splits - 1)
    if rescales == 0:
        return Tiling(0, row_max.unsqueeze(-1).expand_as(scores))
    if not arithmetic.tiling_known:
        return Tiling(rescales, None)
    padded = torch.nn.functional.pad(scores, (0, tiles * block - num_keys), value=-torch.inf)
    tile_max = padded.view(*padded.shape[:-1], tiles, block).amax(-1)
    if arithmetic.order == "descending":
        running = tile_max.flip(-1).cummax(-1).values.flip(-1)
    else:
        running = tile_max.cummax(-1).values
    running = torch.where(torch.isneginf(running), row_max.unsqueeze(-1), running)
    return Tiling(rescales, running.repeat_interleave(block, -1)[..., :num_keys])
