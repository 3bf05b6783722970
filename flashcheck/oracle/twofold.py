"""Double-double numbers: a value as the unevaluated sum of two float64 tensors, about 106 bits.

Error-free transformations are Knuth's two-sum and Dekker's product (torch has no fused multiply-add
on every device). With u = 2^-53, and in the absence of overflow and underflow, the relative errors are

    a + b   3 u^2 + 13 u^3    AccurateDWPlusDW
    a * b   7 u^2             DWTimesDW1
    a / b   15 u^2 + 56 u^3   DWDivDW2
    a * t   2 u^2             (t one float64) DWTimesFP1

by Joldes, Muller, Popescu, *Tight and rigorous error bounds for basic building blocks of double-word
arithmetic*, ACM TOMS 44 (2017) 15, whose algorithm names these are. ``OPERATION`` covers all four.
Underflow adds at most ``UNDERFLOW`` to a result; overflow (a factor above 2^996) gives NaN.
The elementary functions' bounds are derived in README.md, section "Double-double".
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

import torch
from torch import Tensor

from flashcheck.oracle.common_unit import product_is_exact

OPERATION = 2.0**-102
"""Largest relative error of +, -, *, / (16 u^2)."""

ACCUMULATE = 2.0**-103
"""A dot product of n terms errs by at most (n + 1) of this (8 u^2), relative to its sum of magnitudes:
3 u^2 per addition and at most 7 u^2 once for the products."""

EXP = 2.0**-101
LOG_ABSOLUTE = 2.0**-100
TANH_ABSOLUTE = 2.0**-100
SECH2 = 2.0**-99
UNDERFLOW = 2.0**-1060


@dataclass(frozen=True, slots=True)
class Twofold:
    """hi + lo with |lo| <= ulp(hi) / 2; both float64 of one shape."""

    hi: Tensor
    lo: Tensor

    @staticmethod
    def of(x: Tensor) -> Twofold:
        """The float64 tensor ``x``, exactly."""
        return Twofold(x, torch.zeros_like(x))

    def map(self, f: Callable[[Tensor], Tensor]) -> Twofold:
        """``f`` of both parts, for changes of shape."""
        return Twofold(f(self.hi), f(self.lo))

    def where(self, condition: Tensor, otherwise: float = 0.0) -> Twofold:
        """``self`` where ``condition`` holds, elsewhere the float ``otherwise``."""
        return Twofold(torch.where(condition, self.hi, otherwise), torch.where(condition, self.lo, 0.0))

    def scaled(self, power_of_two: float | Tensor) -> Twofold:
        """Product with a power of two: exact."""
        return Twofold(self.hi * power_of_two, self.lo * power_of_two)

    def __neg__(self) -> Twofold:
        return Twofold(-self.hi, -self.lo)

    def __add__(self, other: Twofold) -> Twofold:
        s, e = two_sum(self.hi, other.hi)
        t, f = two_sum(self.lo, other.lo)
        s, e = fast_two_sum(s, e + t)
        return Twofold(*fast_two_sum(s, e + f))

    def __sub__(self, other: Twofold) -> Twofold:
        return self + (-other)

    def __mul__(self, other: Twofold) -> Twofold:
        p, e = two_prod(self.hi, other.hi)
        return Twofold(*fast_two_sum(p, e + (self.hi * other.lo + self.lo * other.hi)))

    def __truediv__(self, other: Twofold) -> Twofold:
        quotient = self.hi / other.hi
        product = times_float(other, quotient)
        rest = (self.hi - product.hi) + (self.lo - product.lo)
        return Twofold(*fast_two_sum(quotient, rest / other.hi))


def two_sum(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """(s, e) with s = fl(a + b) and s + e = a + b exactly."""
    s = a + b
    t = s - a
    return s, (a - (s - t)) + (b - t)


def fast_two_sum(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """As ``two_sum``, for |a| >= |b|."""
    s = a + b
    return s, b - (s - a)


def _split(a: Tensor) -> tuple[Tensor, Tensor]:
    """High and low half of the significand (Veltkamp)."""
    c = 134217729.0 * a  # 2^27 + 1
    high = c - (c - a)
    return high, a - high


def two_prod(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """(p, e) with p = fl(a b) and p + e = a b exactly (Dekker)."""
    p = a * b
    a1, a2 = _split(a)
    b1, b2 = _split(b)
    return p, ((a1 * b1 - p) + a1 * b2 + a2 * b1) + a2 * b2


def times_float(a: Twofold, t: Tensor) -> Twofold:
    """a * t for a float64 ``t``."""
    p, e = two_prod(a.hi, t)
    s, f = fast_two_sum(p, a.lo * t)
    return Twofold(*fast_two_sum(s, f + e))


def constant(value: Fraction | float, like: Tensor) -> Twofold:
    """A number as a twofold scalar on the device of ``like``; relative error at most u^2."""
    exact = Fraction(value)
    high = float(exact)
    low = float(exact - Fraction(high)) if math.isfinite(high) else 0.0
    return Twofold(like.new_tensor(high, dtype=torch.float64), like.new_tensor(low, dtype=torch.float64))


def total(x: Twofold, dim: int) -> Twofold:
    """Sum along ``dim``, pairwise; error at most ACCUMULATE * (number of terms) * sum |x|."""
    x = x.map(lambda t: t.movedim(dim, 0))
    while len(x.hi) > 1:
        half = len(x.hi) // 2
        paired = x.map(lambda t: t[:half]) + x.map(lambda t: t[half : 2 * half])  # noqa: B023
        rest = x.map(lambda t: t[2 * half :])  # noqa: B023
        x = Twofold(torch.cat([paired.hi, rest.hi]), torch.cat([paired.lo, rest.lo]))
    return x.map(lambda t: t[0] if len(t) else t.sum(0))


_AT_ONCE = 1 << 14
"""Elements that one step of a product works on: below, a step costs its call; above, memory's speed."""


def matmul(a: Twofold | Tensor, b: Twofold | Tensor) -> Twofold:
    """(..., n, K) @ (..., K, m) of equal batch shapes, some outer products at a time, added in pairs.

    Float64 tensors count as exact. Error at most ACCUMULATE * (K + 1) * (|a| @ |b|), and K * UNDERFLOW
    more where products underflow: no term passes through more than K additions.
    """
    a_hi, b_hi = (x.hi if isinstance(x, Twofold) else x for x in (a, b))
    shape = (*a_hi.shape[:-2], a_hi.shape[-2], b_hi.shape[-1])
    if a is a_hi and b is b_hi and product_is_exact(a_hi, b_hi):
        return Twofold.of(a_hi @ b_hi)
    result, terms = Twofold.of(a_hi.new_zeros(shape)), a_hi.shape[-1]
    room = _AT_ONCE // max(math.prod(shape), 1)
    step = 1 << (room.bit_length() - 1) if room >= 4 else 1  # pairs of three would be copied
    for first in range(0, terms, step):
        last = min(first + step, terms)
        outer = _product(
            _each(a, lambda t: t[..., first:last].movedim(-1, 0).unsqueeze(-1)),  # noqa: B023
            _each(b, lambda t: t[..., first:last, :].movedim(-2, 0).unsqueeze(-2)),  # noqa: B023
        )
        result = result + total(outer, 0)
    return result


def _each(x: Twofold | Tensor, f: Callable[[Tensor], Tensor]) -> Twofold | Tensor:
    return x.map(f) if isinstance(x, Twofold) else f(x)


def _product(a: Twofold | Tensor, b: Twofold | Tensor) -> Twofold:
    if isinstance(a, Twofold):
        return a * b if isinstance(b, Twofold) else times_float(a, b)
    return times_float(b, a) if isinstance(b, Twofold) else Twofold(*two_prod(a, b))


# log 2 in three parts; the first two are short enough for k * part to be exact for |k| <= 2^11.
_LN2 = Fraction(
    "0.693147180559945309417232121458176568075500134360255254120680009493393621969694715605863326996"
)
_LN2_1 = Fraction(int(_LN2 * 2**40), 2**40)
_LN2_2 = Fraction(int((_LN2 - _LN2_1) * 2**80), 2**80)
_LN2_3 = float(_LN2 - _LN2_1 - _LN2_2)

_DEGREE = 23  # 0.347^24 / 24! < 2^-115
_FLOAT_DEGREE = 14  # from here on float64 is enough: 0.347^14 / 14! < 2^-57


def exp(x: Twofold) -> Twofold:
    """exp; relative error at most EXP, underflow to 0 and overflow to inf as float64 does.

    k = round(x / log 2), then the Taylor polynomial of degree 23 on |r| <= 0.347.
    """
    k = torch.round(x.hi * 1.4426950408889634).clamp(-1100.0, 1030.0)
    r = x - Twofold.of(k * float(_LN2_1)) - Twofold.of(k * float(_LN2_2)) - Twofold.of(k * _LN2_3)
    tail = torch.full_like(r.hi, 1.0 / math.factorial(_DEGREE))
    for n in range(_DEGREE - 1, _FLOAT_DEGREE - 1, -1):
        tail = tail * r.hi + 1.0 / math.factorial(n)
    y = Twofold.of(tail)
    for n in range(_FLOAT_DEGREE - 1, -1, -1):
        y = y * r + constant(Fraction(1, math.factorial(n)), x.hi)
    # Two factors, because 2^k alone may leave the range that the product stays in.
    half = torch.floor(k / 2)
    y = y.scaled(torch.exp2(half)).scaled(torch.exp2(k - half))
    y = y.where(x.hi >= -746.0, 0.0)
    return y.where(~(x.hi > 710.0), torch.inf)


def log(x: Twofold) -> Twofold:
    """Natural log of x in [2^-1000, 2^1000]; absolute error at most LOG_ABSOLUTE + OPERATION |log x|.

    One step from the float64 logarithm y: log x = y + log(1 + t), t = x exp(-y) - 1, |t| < 2^-40.
    """
    y = Twofold.of(torch.log(x.hi))
    t = x * exp(-y) - Twofold.of(torch.ones_like(x.hi))
    t2 = t.hi * t.hi
    return y + (t + Twofold.of(-0.5 * t2 + t2 * t.hi / 3.0))


def tanh(x: Twofold) -> Twofold:
    """tanh by (1 - e) / (1 + e), e = exp(-2 |x|); absolute error at most TANH_ABSOLUTE."""
    sign = torch.where(x.hi < 0, -1.0, 1.0)
    e, one = exp(x.scaled(-2.0 * sign)), Twofold.of(torch.ones_like(x.hi))
    return ((one - e) / (one + e)).scaled(sign)


def sech2(x: Twofold) -> Twofold:
    """1 / cosh^2 by 4 e / (1 + e)^2, e = exp(-2 |x|); relative error at most SECH2."""
    e = exp(x.scaled(torch.where(x.hi < 0, 2.0, -2.0)))
    one_plus = Twofold.of(torch.ones_like(x.hi)) + e
    return e.scaled(4.0) / (one_plus * one_plus)
