"""What every launch of the kernels in Triton passes: the work, lengths and band, and constants."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from kernels.hopper.packed import slots
from kernels.options import Options
from kernels.tuning import Tile


def tiles_of(x: Tensor, block: int, options: Options) -> int:
    """Tiles of ``block`` rows in a head of x; slots (`kernels.hopper.packed`) where segments are packed."""
    if options.cu_q is not None:
        return slots(x.shape[2], options.segments, block)
    return -(-x.shape[2] // block)


def work_arguments(
    num_tiles: int, of: Tensor, section: int, q: Tensor, k: Tensor, options: Options
) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Arguments n_tiles .. right and, behind `ends`, n_segments; ``of``: q or k, whose tiles are the work."""
    numbers = (
        num_tiles,
        of.shape[0] * of.shape[1],
        section,
        of.shape[1],
        q.shape[1] // k.shape[1],
        q.shape[2],
        k.shape[2],
        options.sigma,
        options.left or 0,
        options.right or 0,
    )
    return numbers, (options.segments,)


def ends(options: Options) -> tuple[Tensor | None, Tensor | None]:
    """Arguments p_cu_q and p_cu_k."""
    return options.cu_q, options.cu_k


def band_constants(tile: Tile, q: Tensor, options: Options) -> dict[str, Any]:
    """Constants D .. PACKED but for the head dim's parts, and the launch configuration."""
    return {
        "D": q.shape[3],
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "BOTTOM_RIGHT": options.bottom_right,
        "HAS_LEFT": options.left is not None,
        "HAS_RIGHT": options.right is not None,
        "PACKED": options.cu_q is not None,
        **tile.launch(),
    }
