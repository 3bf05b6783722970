"""Switches that turn single faults on, and count how often a fault's line ran."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import torch
from torch import Tensor

from flashcheck.formats import Format, round_nearest, round_toward_zero


class Switches:
    """The faults that are on. No fault on: the control.

    Attributes:
        hits: how often each fault's line ran. A mutant whose line never ran proves nothing about a check.
    """

    def __init__(self, active: Iterable[str] = ()) -> None:
        self.active = frozenset(active)
        self.hits: Counter[str] = Counter()

    def __call__(self, name: str) -> bool:
        """True where the fault is on; the caller's next line is the faulty one."""
        if name not in self.active:
            return False
        self.hits[name] += 1
        return True

    def size(self, name: str) -> int | None:  # noqa: ARG002
        """How large the loss of precision called ``name`` is; None where it is off."""
        return None


def reduced(bits: int) -> Format:
    """fp32's range with ``bits`` significand bits."""
    return Format(f"e8m{bits - 1}", bits, -126, 3e38, False, torch.float32)


def kept(x: Tensor, on: Switches, name: str, truncated: bool = False) -> Tensor:
    """``x`` (fp32) with as many bits as the loss called ``name`` leaves; itself where that is off."""
    bits = on.size(name)
    if bits is None:
        return x
    rounding = round_toward_zero if truncated else round_nearest
    return rounding(x.double(), reduced(bits)).float()
