"""Bitwise comparison, in which NaN is one value.

IEEE 754-2019 leaves sign and payload of a NaN open (6.2.3, 6.3), and hardware uses that: on x86 the NaN of a
vectorised loop has another sign than those of its last, scalar steps, so that it follows an element's place.
"""

from __future__ import annotations

from torch import Tensor

from flashcheck.bits import bits_of
from flashcheck.kernel import ForwardResult


def differing(a: Tensor, b: Tensor) -> Tensor:
    """Boolean, shape of ``a``: where the stored bits differ, NaN being NaN whatever its bits."""
    return (bits_of(a) != bits_of(b)) & ~(a.isnan() & b.isnan())


def differing_numbers(a: Tensor, b: Tensor) -> Tensor:
    """Boolean, shape of ``a``: where the stored bits differ, zeros of either sign counting as one number.

    For runs that differ in values with weight 0: 0 times a negative value is -0, and a sum of zeros is -0
    only where all of them are (IEEE 754-2019, 6.3), so the sign of a result that underflows may follow
    values that nothing sees.
    """
    return differing(a, b) & ~((a == 0) & (b == 0))


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
