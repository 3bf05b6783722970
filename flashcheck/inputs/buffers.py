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

GUARD = 256
"""Elements of poison before and after every flat allocation: a multiple of every vector width."""


@dataclass(frozen=True, slots=True)
class Hosted:
    """A view and the allocation that holds it.

    Attributes:
        view: what the kernel gets; values equal to the original's.
        allocation: everything around it, the view included.
    """

    view: Tensor
    allocation: Tensor

    def poison(self, value: float) -> None:
        """Fills everything outside the view; the view keeps its values."""
        kept = self.view.clone()
        self.allocation.fill_(value)
        self.view.copy_(kept)

    def snapshot(self) -> Tensor:
        """The bits of the whole allocation."""
        return self.allocation.contiguous().view(torch.uint8).clone()


def _host(x: Tensor, allocation: Tensor, view: Callable[[Tensor], Tensor]) -> Hosted:
    seen = view(allocation.fill_(0.0))
    seen.copy_(x)
    return Hosted(seen, allocation)


def guarded(x: Tensor) -> Hosted:
    """Contiguous inside a flat allocation, with guards on both sides."""
    flat = torch.empty(x.numel() + 2 * GUARD, dtype=x.dtype, device=x.device)
    return _host(x, flat, lambda a: a[GUARD : GUARD + x.numel()].view(x.shape))


def padded(x: Tensor) -> Hosted:
    """Gaps between rows, heads and batches, at an odd offset; the last dimension stays contiguous."""
    b, h, n, d = x.shape
    whole = torch.empty((b + 1, h + 1, n + 3, d + 5), dtype=x.dtype, device=x.device)
    return _host(x, whole, lambda a: a[:b, :h, 2 : n + 2, 4 : d + 4])


def interleaved(x: Tensor) -> Hosted:
    """Layout (batch, length, heads, dim) that uses every other element of the last dimension."""
    b, h, n, d = x.shape
    whole = torch.empty((b, n + 1, h, 2 * d), dtype=x.dtype, device=x.device)
    return _host(x, whole, lambda a: a[:, :n, :, ::2].transpose(1, 2))


LAYOUTS: dict[str, Callable[[Tensor], Hosted]] = {
    "guarded": guarded,
    "padded": padded,
    "interleaved": interleaved,
}


def hosted(problem: Problem, layout: str) -> tuple[Problem, list[Hosted]]:
    """The problem with q, k and v moved into larger allocations, and their hosts in that order."""
    hosts = [LAYOUTS[layout](x) for x in (problem.q, problem.k, problem.v)]
    q, k, v = (h.view for h in hosts)
    return problem.replaced(q=q, k=k, v=v), hosts
