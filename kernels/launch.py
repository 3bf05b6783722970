"""What every launch passes: sizes, options, strides and the constants that follow from them."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from kernels.options import Options
from kernels.tuning import Tile, padded


def device_of(x: Tensor) -> AbstractContextManager[Any]:
    """Triton launches on the current device, which need not be the tensors'."""
    return torch.cuda.device(x.device) if x.device.type == "cuda" else nullcontext()


def pair_arguments(q: Tensor, k: Tensor, options: Options) -> tuple[Any, ...]:
    """Arguments n_heads .. s_slopes of every kernel that forms scores, in their order."""
    no_strides = (0, 0, 0, 0)
    mask, bias, slopes = options.mask, options.bias, options.slopes
    return (
        q.shape[1],
        q.shape[1] // k.shape[1],
        q.shape[2],
        k.shape[2],
        options.sigma,
        options.score_factor,
        options.cap,
        options.left or 0,
        options.right or 0,
        options.key_lengths,
        options.cu_q,
        options.cu_k,
        mask,
        no_strides if mask is None else mask.stride(),
        bias,
        no_strides if bias is None else bias.stride(),
        slopes,
        no_strides[:2] if slopes is None else slopes.stride(),
    )


def pair_constants(
    tile: Tile, options: Options, q: Tensor, k: Tensor, v: Tensor, *others: Tensor
) -> dict[str, Any]:
    """Compile-time constants of every kernel that forms scores, and its launch configuration."""
    return {
        "D": q.shape[3],
        "DV": v.shape[3],
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "BLOCK_D": padded(q.shape[3]),
        "BLOCK_DV": padded(v.shape[3]),
        "WIDE": _needs_wide_offsets(tile, q, k, v, *others),
        "BOTTOM_RIGHT": options.bottom_right,
        "HAS_LEFT": options.left is not None,
        "HAS_RIGHT": options.right is not None,
        "DATA_MASK": options.data_mask,
        "PLAIN": options.plain,
        "SOFTCAP": options.softcap,
        "PRECISION": "ieee" if q.dtype == torch.float32 else "tf32",
        "num_warps": tile.num_warps,
        "num_stages": tile.num_stages,
    }


def _needs_wide_offsets(tile: Tile, *tensors: Tensor) -> bool:
    """Whether offsets inside one tile can pass 2^31 elements."""
    rows = max(tile.block_m, tile.block_n)
    return any(rows * x.stride(2) + padded(x.shape[3]) * x.stride(3) >= 2**31 for x in tensors)
