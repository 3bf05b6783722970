"""Roundings of float32 registers into narrower formats."""

from __future__ import annotations

import torch
from torch import Tensor

from flashcheck.arithmetic import Arithmetic
from flashcheck.formats import FP32, Format, round_nearest


def fp32(x: float) -> float:
    """The float32 number nearest to ``x``."""
    return float(torch.tensor(x, dtype=torch.float64).float())


def round_to(x: Tensor, fmt: Format) -> Tensor:
    """float32 ``x`` rounded to nearest into ``fmt``, kept in a float32 tensor."""
    return x if fmt is FP32 else round_nearest(x.double(), fmt).float()


def product_operand(x: Tensor, arithmetic: Arithmetic) -> Tensor:
    """An operand of a matrix product, converted where the arithmetic declares a format for products.

    Without one it is taken as stored: converting again would turn infinities of a format whose
    conversions saturate into its largest number.
    """
    return x if arithmetic.product_format is None else round_to(x, arithmetic.product_format)


def stored(x: Tensor, fmt: Format) -> Tensor:
    """float32 ``x`` rounded to nearest and stored in ``fmt``'s dtype."""
    return round_to(x, fmt).to(fmt.dtype)
