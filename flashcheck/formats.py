"""Binary floating-point formats: fp64, fp32, fp16, bf16, e4m3, e5m2.

All functions on tensors take and return float64; every value of every narrower format is a float64
value, so rounding *into* a format is exact arithmetic on float64 tensors. Rounding goes through the
bits of the float64 value and never through another dtype: torch converts float64 to fp16 by way of
fp32, which rounds twice.

Notation of THEORY.md section 2: precision p (hidden bit included), unit roundoff u = 2^-p,
smallest normal 2^emin, subnormal quantum eta = 2^(emin - p + 1).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from flashcheck.errors import UnknownNameError


@dataclass(frozen=True, slots=True)
class Format:
    """A binary floating-point format.

    Attributes:
        name: the field's short name, such as ``"bf16"``.
        precision: significand bits p, the hidden bit included.
        min_exponent: emin; the smallest normal number is 2^emin.
        max_finite: the largest finite value.
        saturates: conversions clamp to ``max_finite`` instead of overflowing to infinity
            (``cvt.rn.satfinite``, the only fp8 conversion that NVIDIA hardware has).
        dtype: the torch dtype that stores the format.
    """

    name: str
    precision: int
    min_exponent: int
    max_finite: float
    saturates: bool
    dtype: torch.dtype

    @property
    def unit_roundoff(self) -> float:
        """u = 2^-p: the largest relative error of a rounding to nearest."""
        return 2.0**-self.precision

    @property
    def quantum(self) -> float:
        """eta: the spacing of the subnormal numbers."""
        return 2.0 ** (self.min_exponent - self.precision + 1)

    @property
    def overflow_threshold(self) -> float:
        """The smallest magnitude that rounds to nearest past ``max_finite``."""
        # max_finite has the largest exponent: its spacing is 2^(exponent - p + 1).
        return self.max_finite + math.ldexp(1.0, math.frexp(self.max_finite)[1] - self.precision - 1)

    def __str__(self) -> str:
        return self.name


FP64 = Format("fp64", 53, -1022, torch.finfo(torch.float64).max, False, torch.float64)
FP32 = Format("fp32", 24, -126, torch.finfo(torch.float32).max, False, torch.float32)
FP16 = Format("fp16", 11, -14, 65504.0, False, torch.float16)
TF32 = Format("tf32", 11, -126, (2 - 2.0**-10) * 2.0**127, False, torch.float32)
"""What TF32 products read of fp32 numbers; stored in fp32, so no dtype of its own."""
BF16 = Format("bf16", 8, -126, torch.finfo(torch.bfloat16).max, False, torch.bfloat16)
E4M3 = Format("e4m3", 4, -6, 448.0, True, torch.float8_e4m3fn)
E5M2 = Format("e5m2", 3, -14, 57344.0, True, torch.float8_e5m2)

FORMATS = {f.name: f for f in (FP64, FP32, TF32, FP16, BF16, E4M3, E5M2)}
_BY_DTYPE = {f.dtype: f for f in FORMATS.values() if f is not TF32}


_EXPONENT_BITS = 0x7FF0000000000000


def format_named(name: str) -> Format:
    """The format called ``name``; raises UnknownNameError for any other name."""
    try:
        return FORMATS[name]
    except KeyError:
        raise UnknownNameError("format", name, FORMATS) from None


def format_of(dtype: torch.dtype) -> Format:
    """The format that ``dtype`` stores; raises UnknownNameError for integers and the like."""
    try:
        return _BY_DTYPE[dtype]
    except KeyError:
        raise UnknownNameError("dtype", str(dtype), (str(d) for d in _BY_DTYPE)) from None


def is_power_of_two(x: float) -> bool:
    """True for 2^k: multiplying by it rounds nothing (underflow apart)."""
    return math.frexp(x)[0] == 0.5


def to_float64(x: Tensor) -> Tensor:
    """``x`` as float64, exactly."""
    return x.to(torch.float64)


def ulp_at(magnitude: float, fmt: Format) -> float:
    """Spacing of ``fmt`` at ``magnitude`` (a Python float)."""
    return float(ulp(torch.tensor(magnitude, dtype=torch.float64), fmt))


def ulp(x: Tensor, fmt: Format) -> Tensor:
    """Spacing of ``fmt`` at |x|, never below the subnormal quantum.

    At a power of two it is the spacing above. Shape of ``x``; float64; NaN and inf give the
    spacing of the largest binade.
    """
    return _spacing(x, fmt, 1.0)


def half_ulp(x: Tensor, fmt: Format) -> Tensor:
    """Largest error of rounding to nearest at magnitude |x|; non-decreasing in |x|."""
    return _spacing(x, fmt, 0.5)


def binade(x: Tensor) -> Tensor:
    """2^floor(log2 |x|) of float64 ``x``; 0 for zeros and float64's subnormal numbers, inf for NaN."""
    return (x.contiguous().view(torch.int64) & _EXPONENT_BITS).view(torch.float64)


def _spacing(x: Tensor, fmt: Format, factor: float) -> Tensor:
    """``ulp`` times a power of two."""
    if fmt.min_exponent - fmt.precision + 1 < -1022:  # fp64: the quantum itself is subnormal
        bits = x.contiguous().view(torch.int64)
        exponent = ((bits >> 52) & 0x7FF).clamp(min=fmt.min_exponent + 1023, max=2046)
        return torch.ldexp(torch.full_like(x, factor), exponent - (fmt.precision - 1) - 1023)
    # float64's subnormal numbers lie below every narrower format's emin.
    return (
        binade(x).clamp_(min=2.0**fmt.min_exponent, max=2.0**1023).mul_(factor * 2.0 ** (1 - fmt.precision))
    )


def round_nearest(x: Tensor, fmt: Format) -> Tensor:
    """Round float64 ``x`` to nearest, ties to even, into ``fmt``.

    Past the largest finite value the result is inf, or the largest finite value where the format
    saturates. NaN stays NaN.
    """
    if fmt is FP64:
        return x
    return round_to_spacing(x, ulp(x, fmt), fmt)


def round_inside(x: Tensor, fmt: Format, out: Tensor | None = None) -> Tensor:
    """``round_nearest`` for finite ``x`` whose magnitude rounds to no more than ``max_finite``, in half the
    steps; a zero may lose its sign.

    Adding 1.5 * 2^52 spacings leaves no bits below the spacing: the addition itself rounds to nearest, ties
    to even.

    Args:
        out: float64 tensor of the shape of ``x`` for the result; may be ``x``.
    """
    if fmt is FP64:
        return x if out is None else out.copy_(x)
    spacings = binade(x).clamp_(min=2.0**fmt.min_exponent)
    alpha = 1.5 * 2.0 ** (53 - fmt.precision)
    return torch.add(x, spacings, alpha=alpha, out=out).sub_(spacings, alpha=alpha)


def round_to_spacing(x: Tensor, spacing: Tensor, fmt: Format) -> Tensor:
    """``round_nearest`` for a caller who has ``ulp(x, fmt)`` already."""
    return _limit((x / spacing).round_().mul_(spacing), x, fmt)


def round_toward_zero(x: Tensor, fmt: Format) -> Tensor:
    """Truncate float64 ``x`` into ``fmt``; a finite value never becomes infinite."""
    if fmt is FP64:
        return x
    spacing = ulp(x, fmt)
    truncated = torch.trunc(x / spacing) * spacing
    truncated = truncated.clamp(-fmt.max_finite, fmt.max_finite)
    return torch.where(torch.isinf(x) & (not fmt.saturates), x, truncated)


def _limit(rounded: Tensor, x: Tensor, fmt: Format) -> Tensor:
    limit = fmt.max_finite
    # Both comparisons are False where there is a NaN.
    if not rounded.numel() or (float(rounded.amax()) <= limit and float(rounded.amin()) >= -limit):
        return rounded
    over = rounded.abs() > limit
    end = torch.full_like(x, limit if fmt.saturates else torch.inf)
    return torch.where(over, torch.copysign(end, x), rounded)


def is_representable(x: Tensor, fmt: Format) -> Tensor:
    """True where float64 ``x`` is a value of ``fmt`` (NaN counts as one)."""
    return (round_nearest(x, fmt) == x) | torch.isnan(x)
