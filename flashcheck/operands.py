"""Inputs as a kernel's products take them, where it converts them first: THEORY.md section 2.7.

The conversion is declared (``Arithmetic.input_format`` other than the inputs' own, ``input_scale``) and can
be made again exactly. So it is made here once more, and the kernel is judged on what comes out: the bound
covers the attention, not what the declared format cannot hold.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flashcheck.arithmetic import Arithmetic
from flashcheck.formats import Format, round_nearest
from flashcheck.problem import Problem

LARGEST_POWER = 126
"""Scales and their inverses stay normal fp32 numbers."""


def as_multiplied(problem: Problem, arithmetic: Arithmetic) -> Problem:
    """``problem`` with q, k, v converted as declared and the scales that undo it as descales; or itself.

    With ``input_scale`` "tensor" each tensor is multiplied by the largest power of two c with
    c max|x| <= the format's largest number, the maximum over finite elements that are not padding; |log2 c|
    is at most 126. Then comes one rounding to nearest. NaN stays NaN; infinities become NaN where the
    format's conversions saturate. Rows of padding become zero.
    """
    fmt = arithmetic.input_format
    if fmt is problem.format:
        return problem
    scaled = arithmetic.input_scale == "tensor"
    changes: dict[str, object] = {}
    for name in ("q", "k", "v"):
        x = getattr(problem, name).double()
        if name != "q" and problem.key_lengths is not None:
            row = torch.arange(x.shape[2])[None, None, :, None]
            x = torch.where(row < problem.key_lengths[:, None, None, None], x, 0.0)
        scale = _scale(x, fmt) if scaled else 1.0
        changes[name] = _rounded(x * scale, fmt).to(fmt.dtype)
        changes[f"{name}_descale"] = getattr(problem, f"{name}_descale") / scale
    return problem.replaced(**changes)


def same_scales(one: Problem, other: Problem, arithmetic: Arithmetic) -> bool:
    """Whether the scales that a kernel takes from its inputs agree, so that equal elements become equal.

    A maximum over a tensor couples its rows: the bits of one may follow another that it never sees.
    """
    if arithmetic.input_scale == "none":
        return True
    a, b = (as_multiplied(problem, arithmetic) for problem in (one, other))
    return (a.q_descale, a.k_descale, a.v_descale) == (b.q_descale, b.k_descale, b.v_descale)


def _scale(x: Tensor, fmt: Format) -> float:
    finite = x[torch.isfinite(x)].abs()
    largest = finite.amax() if finite.numel() else torch.zeros(())
    if largest == 0:
        return 1.0
    _, exponent = torch.frexp(torch.tensor(fmt.max_finite, dtype=torch.float64) / largest.double())
    # The quotient is rounded: where it is a power of two, check from below.
    power = int(exponent) - 1
    if 2.0**power * float(largest) > fmt.max_finite:
        power -= 1
    return float(2.0 ** max(-LARGEST_POWER, min(LARGEST_POWER, power)))


def _rounded(x: Tensor, fmt: Format) -> Tensor:
    if fmt.saturates:
        x = torch.where(torch.isinf(x), torch.nan, x)
    return round_nearest(x, fmt)
