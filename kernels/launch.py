"""What every launch passes: sizes, options, strides and the constants that follow from them."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from kernels.operands import Gradients, Operands
from kernels.options import Options
from kernels.score_path import ScorePath
from kernels.tuning import Tile, backward_tile, padded

_NOTHING = nullcontext()


def device_of(x: Tensor) -> AbstractContextManager[Any]:
    """Triton launches on the current device, which need not be the tensors'."""
    if x.device.type != "cuda" or x.device.index == torch.cuda.current_device():
        return _NOTHING
    return torch.cuda.device(x.device)


def with_strides(*tensors: Tensor | None) -> list[Any]:
    """Each tensor and its strides; None and zeros where there is none."""
    return [part for x in tensors for part in (x, (0, 0, 0, 0) if x is None else x.stride())]


def pair_arguments(operands: Operands, options: Options) -> tuple[Any, ...]:
    """Arguments n_heads .. scales of every kernel that forms scores, in their order.

    Lengths and sides stand alone: in a tuple Triton compiles for those that 16 divides, though told not to.
    """
    q, k = operands.q, operands.k
    return (
        q.shape[1],
        q.shape[1] // k.shape[1],
        q.shape[2],
        k.shape[2],
        (options.sigma, options.score_factor, options.cap),
        options.left or 0,
        options.right or 0,
        (options.key_lengths, options.cu_q, options.cu_k),
        tuple(with_strides(options.mask, options.bias, options.slopes)),
        tuple(with_strides(operands.q_factor, operands.k_factor)),
    )


def pair_constants(
    tile: Tile, options: Options, path: ScorePath, q: Tensor, k: Tensor, v: Tensor, *others: Tensor
) -> dict[str, Any]:
    """Compile-time constants of every kernel that forms scores, and its launch configuration."""
    return {
        "D": q.shape[3],
        "DV": v.shape[3],
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "BLOCK_D": padded(q.shape[3], path.smallest_dim()),
        "BLOCK_DV": padded(v.shape[3], path.smallest_dim()),
        "WIDE": _needs_wide_offsets(tile, q, k, v, *others),
        "BOTTOM_RIGHT": options.bottom_right,
        "HAS_LEFT": options.left is not None,
        "HAS_RIGHT": options.right is not None,
        "DATA_MASK": options.data_mask,
        "PLAIN": options.plain,
        "SOFTCAP": options.softcap,
        "SCALES": path.scales_mode,
        "PRECISION": "ieee" if path.operand == "fp32" else "tf32",
        "num_warps": tile.num_warps,
        "num_stages": tile.num_stages,
    }


def softmax_constants(path: ScorePath, head_dim: int, sigma: float | None) -> dict[str, Any]:
    """Compile-time constants of a forward's softmax: its form, and how P gets its scale.

    ``sigma``: as `kernels.options.plain_sigma` returns it.
    """
    lift = path.lift(head_dim, sigma)
    return {
        "SUBTRACT_FIRST": path.subtract_first and not lift,
        "P_SCALE": 1.0 if lift else path.probability_scale,
        "LIFT": lift,
    }


def backward_tile_of(
    kernel: str, gradients: Gradients, operands: Operands, options: Options, path: ScorePath
) -> Tile:
    """The table's tile for a backward kernel."""
    q, v = gradients.q, gradients.v
    element_bytes = 2 if path.gradient in ("fp16", "bf16") else 4
    sizes = (q.shape[3], v.shape[3], options.longest_q, options.longest_k)
    two_copies = gradients.q is not operands.q
    return backward_tile(kernel, q.device.type, element_bytes, *sizes, two_copies=two_copies)


def gradient_constants(gradients: Gradients, operands: Operands, path: ScorePath) -> dict[str, Any]:
    """Further constants of the backward kernels."""
    return {
        "D_SCORE": operands.q.shape[3],
        "SAME": gradients.q is operands.q,
        "GRADIENT": path.gradient,
        "GRADIENT_PRECISION": "ieee" if path.gradient == "fp32" else "tf32",
    }


def _needs_wide_offsets(tile: Tile, *tensors: Tensor) -> bool:
    """Whether offsets inside one tile can pass 2^31 elements."""
    rows = max(tile.block_m, tile.block_n)
    return any(rows * x.stride(2) + padded(x.shape[3]) * x.stride(3) >= 2**31 for x in tensors)
