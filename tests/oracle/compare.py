"""Differences between rungs, exact enough to hold against claimed errors of 1e-32."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flashcheck.oracle import exact
from flashcheck.oracle.twofold import Twofold

DIGITS = 60  # of the reference: its own error is then far below every bound of the other rungs


def halves(values: Any) -> Twofold:
    """Nested lists of mpf as a double-double tensor; relative error 2^-106."""
    high = exact.to_tensor(values)
    low = exact.to_tensor(_finite_rest(values))
    return Twofold(high, low)


def _finite_rest(x: Any) -> Any:
    if isinstance(x, list):
        return [_finite_rest(y) for y in x]
    high = float(x)
    return x - high if high - high == 0 else 0.0


def excess(got: Twofold | Tensor, expected: Twofold, claimed: Tensor) -> float:
    """Largest |got - expected| / claimed; above 1 a claim is broken. 0 where both are equal."""
    got = got if isinstance(got, Twofold) else Twofold.of(got)
    difference = ((got.hi - expected.hi) + (got.lo - expected.lo)).abs()
    difference = torch.where(got.hi == expected.hi, (got.lo - expected.lo).abs(), difference)
    difference = torch.where(torch.isinf(got.hi) & (got.hi == expected.hi), 0.0, difference)
    # The reference itself is only known as a double-double.
    allowed = claimed + 2.0**-105 * expected.hi.abs().nan_to_num(posinf=0.0, neginf=0.0)
    nothing_to_break = (difference == 0) | torch.isinf(claimed)
    ratio = torch.where(nothing_to_break, 0.0, difference / allowed)
    assert not bool(torch.isnan(ratio).any())
    return float(ratio.max()) if ratio.numel() else 0.0
