"""Bitwise comparison; NaN equals NaN of the same bits only."""

from __future__ import annotations

import torch
from torch import Tensor

from flashcheck.kernel import ForwardResult

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def differing(a: Tensor, b: Tensor) -> Tensor:
    """Boolean, shape of ``a``: where the stored bits differ."""
    kind = _INTEGERS[a.element_size()]
    return a.contiguous().view(kind) != b.contiguous().view(kind)


def first_difference(a: ForwardResult, b: ForwardResult) -> str | None:
    """Where two results first differ in a bit, in words; None if they agree everywhere."""
    for name, x, y in (("O", a.out, b.out), ("LSE", a.lse, b.lse)):
        if x is None or y is None:
            continue
        different = differing(x, y)
        if bool(different.any()):
            index = tuple(different.nonzero()[0].tolist())
            place = f"{name}[{','.join(str(i) for i in index)}]"
            values = f"{float(x[index]).hex()} against {float(y[index]).hex()}"
            return f"{place}: {values}; {int(different.sum()):,} of {different.numel():,} elements differ"
    return None
