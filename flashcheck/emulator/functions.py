"""Exponential, logarithm, reciprocal and tanh with the errors that a ``Machine`` allows.

Each is a function of its argument's bits, as hardware's are: the same argument gives the same error in
every tile, row and run. The errors are spread over the whole allowed range by a hash of those bits. The
final rounding to fp32 is part of the allowance, so a function whose allowance is one rounding is
correctly rounded. Arguments and results are float32 tensors.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flashcheck.arithmetic import Machine
from flashcheck.formats import FP32, half_ulp

_ROUNDING = 2.0**-24 * (1 + 2.0**-20)


def exponential(
    x: Tensor,
    machine: Machine,
    *,
    base: float,
    error: float | None = None,
    flush: float | None = None,
    exact_at_zero: bool = True,
) -> Tensor:
    """base^x for base 2 or e.

    Args:
        error: relative error of the kernel's own exponential; None: the machine's.
        flush: results below this are 0; None: the machine's limit.
        exact_at_zero: the result for 0 is 1; polynomials that are not so do exist.
    """
    exact = torch.exp2(x.double()) if base == 2.0 else torch.exp(x.double())
    spread = max((machine.exp_error if error is None else error) - _ROUNDING, 0.0)
    perturbed = exact * (1 + spread * _noise(x, 1))
    if exact_at_zero:
        perturbed = torch.where(x == 0, 1.0, perturbed)
    result = perturbed.float()
    limit = machine.exp_flush if flush is None else flush
    return torch.where(result < limit, 0.0, result)


def logarithm(x: Tensor, machine: Machine) -> Tensor:
    """ln x; exactly 0 for 1."""
    exact = torch.log(x.double())
    allowed = torch.clamp(machine.log_relative * exact.abs(), min=machine.log_absolute)
    spread = (allowed - half_ulp(exact, FP32)).clamp(min=0.0)
    perturbed = torch.where(torch.isfinite(exact), exact + spread * _noise(x, 2), exact)
    return torch.where(x == 1, 0.0, perturbed).float()


def reciprocal(x: Tensor, machine: Machine) -> Tensor:
    """1 / x; the allowance for a quotient covers this and the product that follows."""
    spread = max(machine.division_error - 2 * _ROUNDING, 0.0)
    return ((1 + spread * _noise(x, 3)) / x.double()).float()


def tanh(x: Tensor, machine: Machine) -> Tensor:
    """tanh x; exactly 0 for 0, never past 1."""
    exact = torch.tanh(x.double())
    spread = max(machine.tanh_error - _ROUNDING, 0.0)
    perturbed = torch.where(x == 0, 0.0, exact + spread * _noise(x, 4))
    return perturbed.clamp(-1.0, 1.0).float()


def _noise(x: Tensor, which: int) -> Tensor:
    """A number in [-1, 1] from the bits of ``x`` (float32), float64; a different one per function."""
    h = x.contiguous().view(torch.int32).to(torch.int64) + which * 0x1F123BB5
    for _ in range(2):  # multiply and fold, modulo 2^31: spreads neighbouring arguments
        h = ((h ^ (h >> 15)) * 0x2C1B3C6D) & 0x7FFFFFFF
        h = ((h ^ (h >> 12)) * 0x297A2D39) & 0x7FFFFFFF
    return (h ^ (h >> 15)).double() / 2.0**30 - 1.0
