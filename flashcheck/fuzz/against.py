"""Differential mode: the same cases on two kernels; is the new one ever worse, and where.

Both errors are divided by the *new* kernel's bound, so that the numbers compare; ``regions`` ranks.
"""

from __future__ import annotations

import math

import torch

from flashcheck.checks.judged import Judged, KernelError
from flashcheck.checks.measure import Measured, measure
from flashcheck.kernel import Kernel

_FLOOR = 2.0**-20


def compared(judged: Judged, other: Kernel) -> dict[str, tuple[float, float, float]]:
    """Tensor -> (worst margin, the other's worst margin, log2 of the ratio of their rms errors).

    Empty where one of them has no answer: that is the business of the checks.
    """
    if not judged.answers() or other.capabilities.refuses(judged.problem) is not None:
        return {}
    try:
        result = Judged(other, judged.problem, str(judged.device)).result
    except KernelError:
        return {}
    live = ~judged.empty_rows
    pairs = {"O": (judged.measured["O"], measure("O", result.out, judged.bound.out, live))}
    if result.lse is not None and "LSE" in judged.measured:
        pairs["LSE"] = (judged.measured["LSE"], measure("LSE", result.lse, judged.bound.lse, live))
    numbers = {}
    for tensor, (new, old) in pairs.items():
        if new.worst is not None and old.worst is not None:
            growth = math.log2((_rms(judged, tensor, new) + _FLOOR) / (_rms(judged, tensor, old) + _FLOOR))
            numbers[tensor] = (new.worst.margin, old.worst.margin, growth)
    return numbers


def _rms(judged: Judged, tensor: str, measured: Measured) -> float:
    """Root mean square of |error| / bound over the elements that have a finite one."""
    interval = (judged.bound.out if tensor == "O" else judged.bound.lse).interval
    share = (measured.got - interval.exact).abs() / interval.bound
    share = share[torch.isfinite(share)]
    return float(share.square().mean().sqrt()) if share.numel() else 0.0
