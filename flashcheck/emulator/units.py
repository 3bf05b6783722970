"""Sums as a machine's units take them: every addition rounds where its ``Accumulator`` says.

Two paths give every unit. Rounding to nearest after every product (block 1, 24 bits, no alignment) is
IEEE fp32 arithmetic, which float32 tensors do by themselves. All others go through float64, where the
aligned addends of a step (at most a few dozen bits) add up exactly.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flashcheck.arithmetic import Accumulator, Machine
from flashcheck.formats import FP32, Format, round_nearest, round_toward_zero

_STEP_ELEMENTS = 1 << 20
"""Products held at once by the block path; rows are cut so as to stay below."""


def multiply_add(
    a: Tensor,
    b: Tensor,
    start: Tensor,
    unit: Accumulator,
    operand: Format = FP32,
    seen: Tensor | None = None,
    other: Format | None = None,
) -> Tensor:
    """start + a b, the products taken in ascending order of the inner index.

    Args:
        a: (..., m, K) and b: (..., K, n), float32 tensors that hold values of ``operand``.
        start: (..., m, n) float32.
        unit: how the sums round.
        operand: format of a and b; block units align its subnormal values as if their exponent were emin.
        other: format of b where it is not that of a.
        seen: boolean (..., m, K) or None; products of pairs not seen are skipped, so that a NaN in one
            operand does not meet the zero in the other.

    Returns:
        float32 (..., m, n).
    """
    if unit.flush_subnormals:
        a, b, start = _flush(a, operand), _flush(b, other or operand), _flush(start)
    if unit.block == 1 and unit.fraction_bits is None and _is_ieee_fp32(unit):
        return _sequential(a, b, start, seen, unit.flush_subnormals)
    rows = max(1, _STEP_ELEMENTS * a.shape[-2] // max(1, start.numel() * unit.block))
    parts = [
        _in_blocks(
            a[..., i : i + rows, :],
            b,
            start[..., i : i + rows, :],
            unit,
            (operand, other or operand),
            None if seen is None else seen[..., i : i + rows, :],
        )
        for i in range(0, a.shape[-2], rows)
    ]
    return torch.cat(parts, -2) if parts else start


def add_up(values: Tensor, start: Tensor, unit: Accumulator) -> Tensor:
    """start + the sum of ``values`` over the last dimension, ascending; float32, shape of ``start``."""
    ones = torch.ones(values.shape[-1], 1, dtype=torch.float32)
    return multiply_add(values.unsqueeze(-2), ones, start[..., None, None], unit)[..., 0, 0]


def kept(x: Tensor, machine: Machine) -> Tensor:
    """``x`` as an fp32 operation outside the matrix unit reads or stores it: subnormal numbers as 0 where
    these flush."""
    return _flush(x) if machine.vector.flush_subnormals else x


def _is_ieee_fp32(unit: Accumulator) -> bool:
    return unit.precision == 24 and unit.rounding == "nearest"


def _flush(x: Tensor, fmt: Format = FP32) -> Tensor:
    return torch.where(x.abs() < 2.0**fmt.min_exponent, 0.0, x)


def _sequential(a: Tensor, b: Tensor, start: Tensor, seen: Tensor | None, flush: bool) -> Tensor:
    # The product of two values of 16 bits or fewer is a float32 value, so one rounding per step; that of
    # two float32 values is rounded before the addition, as units without a fused operation do.
    columns = a.mT.contiguous().unsqueeze(-1).unbind(-3)  # K times (..., m, 1)
    lines = b.contiguous().unsqueeze(-2).unbind(-3)  # K times (..., 1, n)
    total = start.clone()
    product = torch.empty_like(total)
    for k, (column, line) in enumerate(zip(columns, lines, strict=True)):
        torch.mul(column, line, out=product)
        if seen is not None:
            product.masked_fill_(~seen[..., k : k + 1], 0.0)
        total.add_(_flush(product) if flush else product)
        if flush:
            total = _flush(total)
    return total


def _in_blocks(
    a: Tensor,
    b: Tensor,
    start: Tensor,
    unit: Accumulator,
    formats: tuple[Format, Format],
    seen: Tensor | None,
) -> Tensor:
    total = start.double()
    a, b = a.double(), b.double()
    binade_a, binade_b = _binade(a, formats[0]), _binade(b, formats[1])
    for first in range(0, a.shape[-1], unit.block):
        step = slice(first, first + unit.block)
        products = a[..., step].unsqueeze(-1) * b[..., step, :].unsqueeze(-3)  # (..., m, k, n)
        if seen is not None:
            products = torch.where(seen[..., step].unsqueeze(-1), products, 0.0)
        if unit.fraction_bits is None:
            total = _store(products.sum(-2) + total, unit)
            continue
        # Every addend is aligned to the largest and truncated; what is left adds up exactly in float64.
        largest = (binade_a[..., step].unsqueeze(-1) * binade_b[..., step, :].unsqueeze(-3)).amax(-2)
        largest = torch.maximum(largest, _binade(total, FP32)).clamp(min=2.0**-600)
        spacing = largest * 2.0**-unit.fraction_bits
        units = products.mul_((1 / spacing).unsqueeze(-2)).trunc_().sum(-2)
        total = _store((units + torch.trunc(total / spacing)) * spacing, unit)
    return total.float()


def _binade(x: Tensor, fmt: Format) -> Tensor:
    """2^floor(log2 |x|), at least 2^emin of the format, at most 2^128; 0 for zero. float64, as ``x``."""
    exponent = (x.contiguous().view(torch.int64) >> 52) & 0x7FF
    exponent = exponent.clamp(min=fmt.min_exponent + 1023, max=128 + 1023)
    return torch.where(x == 0, 0.0, (exponent << 52).view(torch.float64))


def _store(total: Tensor, unit: Accumulator) -> Tensor:
    fmt = Format("accumulator", unit.precision, FP32.min_exponent, FP32.max_finite, False, torch.float32)
    if unit.rounding == "nearest":
        stored = round_nearest(total, fmt)
    else:
        # A sum past the range becomes infinite also where rounding is toward zero.
        stored = torch.where(total.abs() >= 2.0**128, total * torch.inf, round_toward_zero(total, fmt))
    return _flush(stored) if unit.flush_subnormals else stored
