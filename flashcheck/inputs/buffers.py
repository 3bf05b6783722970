"""Hostile memory: the same values as views inside larger, poisoned allocations.

Memory that no row sees may hold anything (contract, point 6). Each layout returns the view a kernel
gets and the whole allocation, so that a guard check can tell whether anything around it changed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from flashcheck.problem import Problem

GUARD = 64
"""Elements of poison before and after every flat allocation."""


@dataclass(frozen=True, slots=True)
class Hosted:
    """A view and the allocation that holds it.

    Attributes:
        view: what the kernel gets; values equal to the original's.
        allocation: everything around it, the view included.
        before: a copy of the allocation, taken before the kernel ran.
    """

    view: Tensor
    allocation: Tensor
    before: Tensor

    def intact(self) -> bool:
        """Nothing in the allocation changed, the view's own values included; NaN bits count too."""
        return torch.equal(_bits(self.allocation), _bits(self.before))


def _bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8)


def _host(x: Tensor, allocation: Tensor, view: Callable[[Tensor], Tensor], poison: float) -> Hosted:
    allocation.fill_(poison)
    seen = view(allocation)
    seen.copy_(x)
    return Hosted(seen, allocation, allocation.clone())


def guarded(x: Tensor, poison: float) -> Hosted:
    """Contiguous, at an odd offset inside a flat allocation with poison on both sides."""
    start = GUARD + 1
    flat = torch.empty(x.numel() + 2 * GUARD + 1, dtype=x.dtype, device=x.device)
    return _host(x, flat, lambda a: a[start : start + x.numel()].view(x.shape), poison)


def padded(x: Tensor, poison: float) -> Hosted:
    """Poison in the gaps between rows, heads and batches; the last dimension stays contiguous."""
    b, h, n, d = x.shape
    whole = torch.empty((b + 1, h + 1, n + 3, d + 5), dtype=x.dtype, device=x.device)
    return _host(x, whole, lambda a: a[:b, :h, 2 : n + 2, 4 : d + 4], poison)


def interleaved(x: Tensor, poison: float) -> Hosted:
    """Layout (batch, length, heads, dim) with poison in every other element of the last dimension."""
    b, h, n, d = x.shape
    whole = torch.empty((b, n + 1, h, 2 * d), dtype=x.dtype, device=x.device)
    return _host(x, whole, lambda a: a[:, :n, :, ::2].transpose(1, 2), poison)


LAYOUTS: dict[str, Callable[[Tensor, float], Hosted]] = {
    "guarded": guarded,
    "padded": padded,
    "interleaved": interleaved,
}


def hosted(problem: Problem, layout: str, poison: float = float("nan")) -> tuple[Problem, list[Hosted]]:
    """The problem with q, k and v moved into poisoned memory, and their hosts in that order."""
    hosts = [LAYOUTS[layout](x, poison) for x in (problem.q, problem.k, problem.v)]
    q, k, v = (h.view for h in hosts)
    return problem.replaced(q=q, k=k, v=v), hosts
