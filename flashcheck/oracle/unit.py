"""How accurate a rung's elementary operations are."""

from __future__ import annotations

from dataclasses import dataclass

from flashcheck.oracle import twofold


@dataclass(frozen=True, slots=True)
class Unit:
    """Accuracy of a rung's elementary operations.

    Attributes:
        operation: relative error of one +, -, *, /.
        accumulate: error of a sum or dot product, per term, relative to the sum of magnitudes.
        exp, sech2: relative errors of exp and 1/cosh^2.
        log, tanh: relative errors; log_absolute, tanh_absolute: what comes on top.
    """

    name: str
    operation: float
    accumulate: float
    exp: float
    sech2: float
    log: float
    log_absolute: float
    tanh: float
    tanh_absolute: float

    def dot(self, terms: int) -> float:
        """Error of a dot product or sum of ``terms`` terms in any order, relative to sum |a||b|."""
        return self.accumulate * (terms + 2)


_U = 2.0**-53

FP64 = Unit(
    name="fp64",
    operation=_U,
    accumulate=_U,  # n u in any order: Jeannerod and Rump, SIMAX 34 (2013) 338
    exp=4 * _U,  # two ulp: the vector libraries behind torch document one
    sech2=16 * _U,  # cosh (two ulp), squared, inverted
    log=4 * _U,
    log_absolute=0.0,
    tanh=4 * _U,
    tanh_absolute=0.0,
)

DOUBLE_DOUBLE = Unit(
    name="double-double",
    operation=twofold.OPERATION,
    accumulate=twofold.ACCUMULATE,
    exp=twofold.EXP,
    sech2=twofold.SECH2,
    log=twofold.OPERATION,
    log_absolute=twofold.LOG_ABSOLUTE,
    tanh=twofold.OPERATION,
    tanh_absolute=twofold.TANH_ABSOLUTE,
)


MAX_BITS = 900
"""Precision past which a bound evaluated in float64 proves no more, because it would underflow."""


def multiprecision(bits: int) -> Unit:
    """mpmath at ``bits`` bits: correctly rounded operations, functions to two ulp (mpmath aims at one)."""
    u = 2.0 ** -min(bits, MAX_BITS)
    return Unit("exact", u, u, 4 * u, 16 * u, 4 * u, 0.0, 4 * u, 0.0)
