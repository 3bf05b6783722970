"""The factor on the scores that a kernel seems to use: fitted, then tried like any other suspect."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from flashcheck.checks.judged import Judged
from flashcheck.checks.suspects import Suspect
from flashcheck.errors import ArgumentError
from flashcheck.oracle import fp64
from flashcheck.oracle.quantities import ForwardQuantities

STEPS = 6
_PROBE = 2.0**-12
"""Relative step of the difference quotient: its error is second order, and the steps repeat."""

SMALLEST = 2.0**-18
"""Factors nearer to 1 explain nothing that is outside a bound."""


def fitted_scale(judged: Judged) -> Suspect | None:
    """The suspect whose scale brings the oracle nearest to the kernel's results (Gauss-Newton in the
    logarithm of the scale); None where there is none.

    One number is fitted: on a problem with one wrong element it always fits, and proves nothing.
    """
    problem = judged.problem
    scale = problem.effective_scale
    if scale == 0:
        return None
    wanted, where = _wrong(judged)
    if not bool(where.any()):
        return None
    log_factor = 0.0
    for _ in range(STEPS):
        try:
            now, probe = (
                _values(judged, fp64.forward(problem.replaced(scale=scale * math.exp(x))))
                for x in (log_factor, log_factor + _PROBE)
            )
        except (ArgumentError, RuntimeError, OverflowError):
            return None
        slope, error = ((probe - now) / _PROBE)[where], (wanted - now)[where]
        known = torch.isfinite(slope) & torch.isfinite(error)
        square = float(slope[known].square().sum())
        if square == 0 or not math.isfinite(square):
            return None
        step = float((slope[known] * error[known]).sum()) / square
        log_factor += max(-1.0, min(1.0, step))
        if abs(step) < _PROBE * 2.0**-20:
            break
    if not SMALLEST < abs(log_factor) < 20:
        return None
    factor = math.exp(log_factor)
    text = f"the scores are multiplied by {factor:.5g} times the right scale"
    return Suspect(text, problem.replaced(scale=scale * factor), "scale")


def _wrong(judged: Judged) -> tuple[Tensor, Tensor]:
    """The kernel's values and where they are wrong and finite: LSE's, the more exact ones, where it is."""
    name = "LSE" if "LSE" in judged.measured and judged.measured["LSE"].over else "O"
    measured = judged.measured[name]
    return measured.got, (measured.margin > 1) & torch.isfinite(measured.got)


def _values(judged: Judged, exact: ForwardQuantities) -> Tensor:
    lse = "LSE" in judged.measured and judged.measured["LSE"].over
    return exact.lse if lse else exact.out
