"""Bitwise comparison; NaN equals NaN of the same bits only."""

from __future__ import annotations

from torch import Tensor

from flashcheck.bits import bits_of
from flashcheck.kernel import ForwardResult


def differing(a: Tensor, b: Tensor) -> Tensor:
    """Boolean, shape of ``a``: where the stored bits differ."""
    return bits_of(a) != bits_of(b)


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
