"""The kernel's exponential as the bounds see it: THEORY.md [W5], [B1]."""

from __future__ import annotations

import math
from dataclasses import dataclass

from flashcheck.arithmetic import Arithmetic, Machine


@dataclass(frozen=True, slots=True)
class Exponential:
    """Limits of one exponential.

    Attributes:
        log_error: e = -ln(1 - E), E the relative error: the logarithm of a result errs by at most this.
        flush: results below this may be 0.
    """

    log_error: float
    flush: float


def exponential_of(arithmetic: Arithmetic, machine: Machine) -> Exponential:
    """The exponential that the arithmetic declares, or else the machine's.

    For a backward pass give ``arithmetic.in_backward``.
    """
    error = machine.exp_error if arithmetic.exp_error is None else arithmetic.exp_error
    flush = machine.exp_flush if arithmetic.exp_flush is None else arithmetic.exp_flush
    return Exponential(-math.log1p(-error), flush)
