"""Balls to decimal digits and to bit patterns, in integers: correctly rounded, or said to be undecided."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from flashcheck.formats import BF16, FP16, FP32, FP64, Format

Ball = Any  # flint.arb

DIGITS = 30
PATTERNS = (FP64, FP32, FP16, BF16)
"""Formats into which expected values are rounded."""

_WIDTH = {"fp64": 64, "fp32": 32, "fp16": 16, "bf16": 16, "e4m3": 8, "e5m2": 8}
_NAN = {"fp64": 0x7FF8 << 48, "fp32": 0x7FC0 << 16, "fp16": 0x7E00, "bf16": 0x7FC0}
_PLAIN_EXPONENT = 20_000
"""Numbers beyond 2^+-this are scaled by balls, not by integers of as many bits."""

_EXTRA_BITS = 192
"""Precision on top of the ball's for that: a power 10^k loses the bits of k, and |k| < 2^128."""


class UndecidedError(Exception):
    """The ball contains a number at which the rounding changes: more precision is needed, or it is a tie."""


@dataclass(frozen=True, slots=True)
class Span:
    """[low, high] * 2^exponent, integers; ``special``: "zero", "nan", "inf", "-inf" or "" for a number.

    Attributes:
        ball: what it came from.
        tie: a span that contains one rounding boundary is taken to lie on it.
    """

    low: int
    high: int
    exponent: int
    special: str
    ball: Ball
    tie: bool = False

    @staticmethod
    def of(ball: Ball, tie: bool = False) -> Span:
        """Raises UndecidedError where the sign is."""
        if ball.is_nan():
            return Span(0, 0, 0, "nan", ball)
        if not ball.is_finite():
            if ball.contains(0):
                raise UndecidedError
            return Span(0, 0, 0, "inf" if ball > 0 else "-inf", ball)
        if ball.is_zero():
            return Span(0, 0, 0, "zero", ball)
        man, exp = (int(x) for x in ball.mid().man_exp())
        rad, rad_exp = (int(x) for x in ball.rad().man_exp())
        low = high = man
        if rad:
            shift = rad_exp - exp
            if shift >= 0:
                low, high = man - (rad << shift), man + (rad << shift)
            else:
                man, exp = man << -shift, rad_exp
                low, high = man - rad, man + rad
        if low <= 0 <= high:
            raise UndecidedError
        return Span(low, high, exp, "", ball, tie)

    @property
    def binary_exponent(self) -> int:
        """floor(log2 |x|) of the end farther from 0."""
        return max(abs(self.low), abs(self.high)).bit_length() + self.exponent - 1

    def times_power_of_two(self, power: int) -> int:
        """Nearest integer of x * 2^power."""
        shift = self.exponent + power
        return self._agreed(_shifted(self.low, shift), _shifted(self.high, shift))

    def times_power_of_ten(self, power: int) -> int:
        """Nearest integer of x * 10^power."""
        if max(abs(self.exponent), abs(power)) > _PLAIN_EXPONENT:
            return self._scaled(power)
        factor, divisor = 10 ** max(power, 0), 10 ** max(-power, 0)
        ends = []
        for x in (self.low, self.high):
            top, bottom = x * factor, divisor
            if self.exponent >= 0:
                top <<= self.exponent
            else:
                bottom <<= -self.exponent
            ends.append(_quotient(top, bottom))
        return self._agreed(*ends)

    def _scaled(self, power: int) -> int:
        import flint

        bits = flint.ctx.prec + _EXTRA_BITS
        with flint.ctx.workprec(bits):
            scaled = Span.of(self.ball * flint.arb(10) ** power)
        return Span(scaled.low, scaled.high, scaled.exponent, "", self.ball, self.tie).times_power_of_two(0)

    def _agreed(self, low: int, high: int) -> int:
        if low == high:
            return low
        if self.tie and high - low == 1:
            return low if low % 2 == 0 else high
        raise UndecidedError


def width(fmt: Format) -> int:
    """Bits of a stored number."""
    return _WIDTH[fmt.name]


def decimal(span: Span) -> str:
    """``d.ddd...ex`` with 30 significant digits, trailing zeros dropped; or ``0``, ``nan``, ``[-]inf``."""
    if span.special:
        return {"zero": "0"}.get(span.special, span.special)
    exponent = _decimal_exponent(span)
    count = span.times_power_of_ten(DIGITS - 1 - exponent)
    if len(str(abs(count))) < DIGITS:
        exponent -= 1
        count = span.times_power_of_ten(DIGITS - 1 - exponent)
    digits = str(abs(count))
    exponent += len(digits) - DIGITS
    head, tail = digits[0], digits[1:].rstrip("0")
    sign = "-" if count < 0 else ""
    return f"{sign}{head}{'.' + tail if tail else ''}e{exponent}"


def pattern(span: Span, fmt: Format) -> int:
    """The code of the nearest number of the format, ties to even, overflow to infinity."""
    sign_bit, top = 1 << (width(fmt) - 1), infinity(fmt)
    if span.special == "nan":
        return _NAN[fmt.name]
    if span.special:
        return {"zero": 0, "inf": top, "-inf": sign_bit | top}[span.special]
    sign = sign_bit if span.high < 0 else 0
    exponent = span.binary_exponent
    if exponent < fmt.min_exponent - fmt.precision - 1:
        return sign
    if exponent > fmt.min_exponent + (1 << (width(fmt) - fmt.precision)):
        return sign | top
    quantum = fmt.min_exponent - fmt.precision + 1
    lowest = max(exponent - fmt.precision + 1, quantum)
    magnitude = abs(span.times_power_of_two(-lowest))
    hidden = 1 << (fmt.precision - 1)
    # A carry out of the significand lands in the exponent by itself; subnormals have lowest = quantum.
    code = magnitude if magnitude < hidden else ((lowest - quantum) << (fmt.precision - 1)) + magnitude
    return sign | min(code, top)


def infinity(fmt: Format) -> int:
    """Code of +inf: all ones in the exponent."""
    return ((1 << (width(fmt) - fmt.precision)) - 1) << (fmt.precision - 1)


def _shifted(x: int, shift: int) -> int:
    """Nearest integer of x * 2^shift, ties to even."""
    if shift >= 0:
        return x << shift
    return _quotient(x, 1 << -shift)


def _quotient(top: int, bottom: int) -> int:
    """Nearest integer of top / bottom, bottom > 0, ties to even."""
    whole, rest = divmod(top, bottom)
    double = 2 * rest
    return whole + (double > bottom or (double == bottom and whole % 2 == 1))


def _decimal_exponent(span: Span) -> int:
    """floor(log10 |x|), perhaps one too large."""
    binary = span.binary_exponent
    if abs(binary) < 1 << 40:
        return math.floor((binary + 1) * math.log10(2.0) + 1e-3)
    import flint

    with flint.ctx.workprec(_EXTRA_BITS + abs(binary).bit_length()):
        log = flint.arb(binary + 1) * flint.arb(2).log() / flint.arb(10).log()
        man, exp = (int(x) for x in (log.mid() + flint.arb(2) ** -20).floor().mid().man_exp())
    return man << exp if exp >= 0 else man >> -exp
