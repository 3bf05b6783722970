"""Which calls the Hopper kernels take, and how their tensors become descriptors of the copy engine."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any

from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from kernels.operands import Operands
from kernels.options import LOG2E, Options, is_plain_factor
from kernels.score_path import FP8, ScorePath
from kernels.tuning import HOPPER_HEAD_DIMS, architecture, hopper_has, padded

_ALIGNMENT = 16  # bytes, of a descriptor's base and strides
_SCALES_OF_ROWS = 2  # of `ScorePath.scales_mode`


def takes(q: Tensor, k: Tensor, v: Tensor, options: Options, *others: Tensor) -> bool:
    """Whether the Hopper kernels run this call: the device has them, and their tiles are tuned for it.

    ``others``: further tensors of the backward; without any it is a forward.
    """
    kind = "backward" if others else ("packed" if options.cu_q is not None else "forward")
    return (
        architecture(q.device.type) == "sm90"
        and hopper_has(q.element_size(), q.shape[3], v.shape[3], kind)
        and possible(q, k, v, options, *others)
    )


def possible(q: Tensor, k: Tensor, v: Tensor, options: Options, *others: Tensor) -> bool:
    """Whether the kernels cover the options, dtype and dims, and the copy engine can read all tensors."""
    return (
        (simple(options) or packed(options))
        and q.element_size() == 2
        and q.shape[3] == v.shape[3]
        and padded(q.shape[3]) in HOPPER_HEAD_DIMS
        and all(_readable(x) for x in (q, k, v, *others))
    )


def takes_fp8(operands: Operands, options: Options, path: ScorePath) -> bool:
    """Whether the Hopper forward runs a call whose products are fp8."""
    return architecture(operands.q.device.type) == "sm90" and fp8_possible(operands, options, path)


def fp8_possible(operands: Operands, options: Options, path: ScorePath) -> bool:
    """`possible` of fp8 operands; v may lie in any way: it is copied where its keys are not contiguous."""
    q, k, v = operands.q, operands.k, operands.v
    return (
        simple(options)
        and path.operand in FP8
        and path.scales_mode != _SCALES_OF_ROWS
        and q.shape[3] == v.shape[3]
        and padded(q.shape[3]) in HOPPER_HEAD_DIMS
        and all(_readable(x) for x in (q, k))
    )


def columns_readable(v: Tensor) -> bool:
    """Whether a descriptor can describe v with its keys contiguous."""
    x = v.mT
    return (
        x.data_ptr() % _ALIGNMENT == 0
        and x.stride(3) == 1
        and all(
            n == 1 or (stride > 0 and stride * x.element_size() % _ALIGNMENT == 0)
            for n, stride in zip(x.shape[:3], x.stride()[:3], strict=True)
        )
    )


def simple(options: Options) -> bool:
    """Whether a call has no more options than these kernels cover: a band, and a scale above 2^-126."""
    dense = options.cu_q is None and options.key_lengths is None
    return options.plain and not options.data_mask and dense and options.sink is None


def packed(options: Options) -> bool:
    """`simple`, but for packed segments."""
    return options.cu_q is not None and simple(replace(options, cu_q=None, cu_k=None))


def simple_by_name(given: Mapping[str, Any]) -> bool:
    """`simple`, asked of the options as a user gives them."""
    scale = given.get("scale")
    return set(given) <= {"scale", "causal", "window"} and (scale is None or is_plain_factor(scale * LOG2E))


def packed_by_name(given: Mapping[str, Any]) -> bool:
    """`packed`, asked of the options as a user gives them."""
    rest = {name: x for name, x in given.items() if name not in {"cu_seqlens_q", "cu_seqlens_k"}}
    return given.get("cu_seqlens_q") is not None and simple_by_name(rest)


def _readable(x: Tensor) -> bool:
    """Whether a descriptor can describe x: not empty, aligned, rows contiguous, no stride of 0 or less."""
    return x.data_ptr() % _ALIGNMENT == 0 and _readable_from_there(x.shape, x.stride(), x.element_size())


@lru_cache(1024)
def _readable_from_there(shape: tuple[int, ...], strides: tuple[int, ...], element_bytes: int) -> bool:
    return (
        math.prod(shape) > 0
        and strides[3] == 1
        and shape[3] * element_bytes % _ALIGNMENT == 0
        and all(
            n == 1 or (stride > 0 and stride * element_bytes % _ALIGNMENT == 0)
            for n, stride in zip(shape[:3], strides[:3], strict=True)
        )
    )


def descriptor(x: Tensor, rows: int) -> TensorDescriptor:
    """Tiles of ``rows`` whole rows of one (batch, head), padded; what lies outside reads as zero."""
    # The stride of a dimension of one entry is never used, but has to be legal.
    strides = [s if n > 1 else x.shape[3] for n, s in zip(x.shape[:3], x.stride()[:3], strict=True)]
    return TensorDescriptor(x, list(x.shape), [*strides, 1], [1, 1, rows, padded(x.shape[3])])


def part_descriptors(
    x: Tensor, rows: int, widths: tuple[int, int]
) -> tuple[TensorDescriptor, TensorDescriptor | None]:
    """Tiles of ``rows`` rows of one (batch, head): of the first part of the head dim, and of the second."""
    strides = [s if n > 1 else x.shape[3] for n, s in zip(x.shape[:3], x.stride()[:3], strict=True)]
    found = [
        TensorDescriptor(x, list(x.shape), [*strides, 1], [1, 1, rows, width]) if width else None
        for width in widths
    ]
    return found[0], found[1]


def columns_descriptor(v: Tensor, rows: int) -> TensorDescriptor:
    """Tiles of ``rows`` keys of one (batch, head), a dim a row; what lies outside reads as zero."""
    x = v.mT
    aligned = -(-x.shape[3] // _ALIGNMENT) * _ALIGNMENT
    strides = [s if n > 1 else aligned for n, s in zip(x.shape[:3], x.stride()[:3], strict=True)]
    return TensorDescriptor(x, list(x.shape), [*strides, 1], [1, 1, padded(x.shape[2]), rows])


def section_heads(kv: Tensor, longest: int, group: int, total_heads: int, budget: int = 32 << 20) -> int:
    """Query heads that run side by side: whose keys and values together stay in the second-level cache.

    ``longest``: rows that a program walks along at most; packed segments follow one another.
    """
    per_kv_head = 2 * longest * kv.shape[3] * kv.element_size()
    return min(total_heads, max(1, budget // max(per_kv_head, 1)) * group)
