"""Which of torch's matrix products on a CPU flush subnormal numbers: measured with small products.

Instructions for bf16 (AVX512_BF16, AMX) take subnormal operands for 0 and flush subnormal sums, whatever
the process sets. torch chooses them by the shape of the product and the processor it finds, so the answer
belongs to this process and is not assumed of any other. (Limits that the user sets for one of the libraries
below torch, such as ONEDNN_MAX_CPU_ISA, need not reach the others.) JAX takes the same instructions: measured
on a CPU with AMX, its attention in bf16 lies 251 times outside a bound that keeps subnormal numbers.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from flashcheck.formats import BF16, FP16, Format

NARROW = (FP16, BF16)
"""Formats for which processors have matrix instructions of their own."""

_SIZES = (8, 32, 128)  # from plain loops to blocked instructions


def kept_by_matmul(fmt: Format) -> tuple[bool, bool]:
    """Whether torch's products of this format keep subnormal operands, and subnormal results of normal
    operands; on the CPU, at each of some sizes, plain and batched."""
    tiny, half = fmt.quantum, 2.0 ** (fmt.min_exponent // 2 - 1)
    # 2^12 times the quantum is a normal number: what is missing there was lost on the way in.
    operands = all(_keeps(fmt, n, tiny, 2.0**12) for n in _SIZES)
    # In fp16 the sum is a normal fp32 number on its way and is rounded to a subnormal one.
    results = all(_keeps(fmt, n, half, half) for n in _SIZES)
    return operands, results


@cache
def flushed_formats() -> tuple[str, ...]:
    """Names of the formats whose products flush here, operands or results."""
    return tuple(fmt.name for fmt in NARROW if not all(kept_by_matmul(fmt)))


def _keeps(fmt: Format, size: int, left: float, right: float) -> bool:
    """left * right comes out right, both ways round, as the only product of each sum of a square matrix."""
    a, b = (torch.zeros(2, size, size, dtype=fmt.dtype) for _ in range(2))
    a[..., 0], b[:, 0] = left, right
    products: list[Tensor] = [a[0] @ b[0], b[0].mT @ a[0].mT, a @ b, b.mT @ a.mT]
    return all(bool((x.double() == left * right).all()) for x in products)
