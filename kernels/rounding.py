"""Rounding of fp32 tiles into the formats in which operands enter the matrix unit: one place for all kernels.

`nearest` rounds in the fp32 domain, bit by bit, so that a compiled kernel and the interpreter agree; the
cast that follows is then exact. A compiled kernel leaves fp8 to the conversion instruction, which rounds to
nearest even and saturates too (tests/kernels/on_gpu.py compares the two over all fp32 numbers).
"""

import triton
import triton.language as tl

from kernels.interpreter import interpreted

_EXPLICIT = tl.constexpr(interpreted())


@triton.jit
def nearest(x, DROPPED: tl.constexpr, QUANTUM: tl.constexpr, SMALLEST: tl.constexpr, LARGEST: tl.constexpr):
    """fp32 ``x`` to nearest even, with DROPPED fewer significand bits.

    Args:
        QUANTUM: base-2 logarithm of the spacing of subnormal numbers, which lie below SMALLEST.
        LARGEST: magnitude that larger ones, infinity too, become.

    Returns:
        fp32 values of the format; NaN stays NaN, and zero keeps its sign.
    """
    bits = x.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    odd = (magnitude >> DROPPED) & 1
    normal = ((magnitude + (1 << (DROPPED - 1)) - 1 + odd) >> DROPPED) << DROPPED
    # Adding a number whose last place is the quantum makes the adder round there.
    anchor: tl.constexpr = 2.0 ** (23 + QUANTUM)
    small = (tl.abs(x) + anchor) - anchor
    size = tl.where(tl.abs(x) < SMALLEST, small, normal.to(tl.float32, bitcast=True))
    size = tl.minimum(size, LARGEST)
    sign = bits & -2147483648
    signed = (size.to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True)
    return tl.where(x != x, x, signed)  # noqa: PLR0124


@triton.jit
def nearest_e4m3(x):
    return nearest(x, 20, -9, 0.015625, 448.0)


@triton.jit
def nearest_e5m2(x):
    return nearest(x, 21, -16, 6.103515625e-05, 57344.0)


@triton.jit
def nearest_tf32(x):
    """fp32 with 10 fraction bits: what a TF32 product reads of its operands."""
    bits = x.to(tl.int32, bitcast=True)
    odd = (bits >> 13) & 1
    rounded = (((bits + 0xFFF + odd) >> 13) << 13).to(tl.float32, bitcast=True)
    return tl.where(x != x, x, rounded)  # noqa: PLR0124


@triton.jit
def to_operand(x, FORMAT: tl.constexpr):
    """fp32 ``x`` in the format called FORMAT: fp16, bf16, fp32, tf32 (stored as fp32), e4m3 or e5m2."""
    if FORMAT == "e4m3":
        rounded = nearest_e4m3(x) if _EXPLICIT else x
        result = rounded.to(tl.float8e4nv)
    elif FORMAT == "e5m2":
        rounded = nearest_e5m2(x) if _EXPLICIT else x
        result = rounded.to(tl.float8e5)
    elif FORMAT == "tf32":
        result = nearest_tf32(x)
    elif FORMAT == "bf16":
        result = x.to(tl.bfloat16)
    elif FORMAT == "fp16":
        result = x.to(tl.float16)
    else:
        result = x
    return result
