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


def tiling_of(scores: Tensor, row_max: Tensor, arithmetic: Arithmetic, has_sink: bool) -> Tiling:
    """Tiling of a row of ``scores`` (B, H, Nq, n; -inf where hidden) with final maxima ``row_max``.

    With a sink the last column is the sink's. It is taken into the running state after all tiles
    (``sink_position`` "last": one more rescaling) or before them ("first").
    Keys in tiles that precede the first visible key get the final maximum: they carry no weight.
    """
    keys = scores[..., :-1] if has_sink else scores
    num_keys = keys.shape[-1]
    block = arithmetic.block_keys or SMALLEST_TILE
    tiles = max(-(-num_keys // block), 1)
    rescales = tiles - 1 + (arithmetic.splits - 1) + (1 if has_sink else 0)
    if arithmetic.normalise == "before_product" or rescales == 0:
        return Tiling(0, row_max.unsqueeze(-1).expand_as(scores))
    if num_keys and not arithmetic.tiling_known:
        return Tiling(rescales, None)
    final = row_max.unsqueeze(-1)
    padded = torch.nn.functional.pad(keys, (0, tiles * block - num_keys), value=-torch.inf)
    tile_max = padded.view(*padded.shape[:-1], tiles, block).amax(-1)
    if has_sink and arithmetic.sink_position == "first":
        tile_max = torch.maximum(tile_max, scores[..., -1:])
    if arithmetic.order == "descending":
        running = tile_max.flip(-1).cummax(-1).values.flip(-1)
    else:
        running = tile_max.cummax(-1).values
    running = torch.where(torch.isneginf(running), final, running)
    running = running.repeat_interleave(block, -1)[..., :num_keys]
    if has_sink:
        first = scores[..., -1:] if arithmetic.sink_position == "first" else final
        running = torch.cat([running, torch.where(torch.isneginf(first), final, first)], -1)
    return Tiling(rescales, running)
