"""Decimal strings to bit patterns in exact rationals: the second opinion on ``rounding.py``."""

from __future__ import annotations

from fractions import Fraction

from flashcheck.formats import Format
from flashcheck.golden.rounding import DIGITS, width

_OUT_OF_RANGE = 400
"""Decimal exponents past which every format's answer is 0 or infinity."""


def rounded(text: str, fmt: Format) -> set[int]:
    """Codes to which a number with these 30 digits may round: one, or two next to a rounding boundary."""
    sign_bit = 1 << (width(fmt) - 1)
    infinity = ((1 << (width(fmt) - fmt.precision)) - 1) << (fmt.precision - 1)
    if text == "nan":
        return {infinity | 1 << (fmt.precision - 2)}
    if text == "0":
        return {0}
    sign = sign_bit if text.startswith("-") else 0
    if text.endswith("inf"):
        return {sign | infinity}
    mantissa, _, exponent = text.removeprefix("-").partition("e")
    if abs(int(exponent)) > _OUT_OF_RANGE:
        return {sign | (infinity if int(exponent) > 0 else 0)}
    exact = Fraction(mantissa) * Fraction(10) ** int(exponent)
    slack = Fraction(10) ** (int(exponent) - DIGITS + 1) / 2
    return {sign | _nearest(x, fmt, infinity) for x in (exact - slack, exact, exact + slack)}


def _nearest(x: Fraction, fmt: Format, infinity: int) -> int:
    """Code of the nearest number to x >= 0, ties to even."""
    quantum = fmt.min_exponent - fmt.precision + 1
    exponent = quantum
    if x:
        exponent = max(x.numerator.bit_length() - x.denominator.bit_length() - fmt.precision, quantum)
        while x / Fraction(2) ** exponent >= 1 << fmt.precision:
            exponent += 1
    scaled = x / Fraction(2) ** exponent
    whole, rest = divmod(scaled, 1)
    count = int(whole)
    if rest > Fraction(1, 2) or (rest == Fraction(1, 2) and count % 2 == 1):
        count += 1
    hidden = 1 << (fmt.precision - 1)
    code = count if count < hidden else ((exponent - quantum) << (fmt.precision - 1)) + count
    return min(code, infinity)
