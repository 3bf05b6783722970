"""The running maximum under a declared tiling: which reference maximum each weight was taken against."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from flashcheck.arithmetic import Arithmetic
from flashcheck.bounds.rows import SoftmaxRows

SMALLEST_TILE = 16
"""Keys per tile that an undeclared tiling has at least: no matrix unit takes fewer."""


@dataclass(frozen=True, slots=True)
class Tiling:
    """Geometry of the online softmax for one problem.

    Attributes:
        rescales: upper limit of the number of rescaling steps after the first tile.
        running_max: (B, H, Nq, T) the running maximum of each tile (the sink counts as a tile of its own,
            the last column), or (B, H, Nq, 1) where all weights are taken against one maximum; None where
            the tiling is not declared.
        sizes: (keys of a tile, keys without the sink); None where there is one column only.
    """

    rescales: int
    running_max: Tensor | None
    sizes: tuple[int, int] | None = None

    def per_key(self, x: Tensor) -> Tensor:
        """(B, H, Nq, T) as (B, H, Nq, n), or as it is where it broadcasts over the keys anyway."""
        if self.sizes is None or x.shape[-1] == 1:
            return x
        block, num_keys = self.sizes
        tiles = max(-(-num_keys // block), 1)  # without keys the sink still stands behind one tile
        # Expanding is ten times as fast as picking by index.
        each = x[..., :tiles, None].expand(*x.shape[:-1], tiles, block)
        keys = each.reshape(*x.shape[:-1], tiles * block)[..., :num_keys]
        return keys if x.shape[-1] == tiles else torch.cat([keys, x[..., tiles:]], -1)

    def with_keys(self, function: Callable[[Tensor, Tensor], Tensor], keys: Tensor, x: Tensor) -> Tensor:
        """Elementwise ``function`` of ``keys`` (B, H, Nq, n) and of ``x`` per key; copies ragged tiles."""
        if self.sizes is not None and x.shape[-1] > 1:
            block, tiles = self.sizes[0], x.shape[-1]
            if keys.shape[-1] == tiles * block == self.sizes[1]:
                whole = keys.view(*keys.shape[:-1], tiles, block)
                return function(whole, x.unsqueeze(-1)).flatten(-2)
        return function(keys, self.per_key(x))


def tiling_of(rows: SoftmaxRows, arithmetic: Arithmetic) -> Tiling:
    """Tiling of the rows.

    A sink is taken into the running state after all tiles (``sink_position`` "last": one more rescaling)
    or before them ("first"). Keys in tiles that precede the first visible key get the final maximum: they
    carry no weight.
    """
    num_keys = rows.num_keys - int(rows.has_sink)
    block = arithmetic.block_keys or SMALLEST_TILE
    tiles = max(-(-num_keys // block), 1)
    rescales = tiles - 1 + (arithmetic.splits - 1) + int(rows.has_sink)
    if arithmetic.normalise == "before_product" or rescales == 0:
        return Tiling(0, rows.row_max)
    if num_keys and not arithmetic.tiling_known:
        return Tiling(rescales, None)
    gap = rows.gap if rows.mask is None else torch.where(rows.mask > 0, rows.gap, torch.inf)
    keys = gap[..., :num_keys]
    padded = torch.nn.functional.pad(keys, (0, tiles * block - num_keys), value=torch.inf)
    behind = padded.view(*padded.shape[:-1], tiles, block).amin(-1)  # m - (largest score of the tile)
    if rows.has_sink and arithmetic.sink_position == "first":
        behind = torch.minimum(behind, gap[..., -1:])
    if arithmetic.order == "descending":
        behind = behind.flip(-1).cummin(-1).values.flip(-1)
    else:
        behind = behind.cummin(-1).values
    if rows.has_sink:
        own = gap[..., -1:] if arithmetic.sink_position == "first" else torch.zeros_like(rows.row_max)
        behind = torch.cat([behind, own], -1)
    running = rows.row_max - behind.nan_to_num(0.0, posinf=0.0)
    return Tiling(rescales, running, (block, num_keys))
