"""Hostile memory: the same values as views inside larger, poisoned allocations.

Memory that no row sees may hold anything (contract, point 6). Each layout returns the view a kernel
gets and the whole allocation, so that a guard check can tell whether anything around it changed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from flashcheck.bits import bits_of
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
        """Fills everything outside the view; the view keeps its values. NaN in a boolean tensor is True."""
        kept = self.view.clone()
        self.allocation.fill_(value)
        self.view.copy_(kept)

    def snapshot(self) -> Tensor:
        """The bits of the whole allocation."""
        return bits_of(self.allocation).clone()


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


def transposed(x: Tensor) -> Hosted:
    """The last two dimensions swapped in memory: (batch, heads, dim, length), no unit stride along dim."""
    b, h, n, d = x.shape
    whole = torch.empty((b, h, d + 1, n + 3), dtype=x.dtype, device=x.device)
    return _host(x, whole, lambda a: a[:, :, :d, 1 : n + 1].mT)


def packed(x: Tensor) -> Hosted:
    """One of three tensors that a fused projection writes side by side: (batch, length, 3, heads, dim)."""
    b, h, n, d = x.shape
    whole = torch.empty((b, n + 1, 3, h, d), dtype=x.dtype, device=x.device)
    return _host(x, whole, lambda a: a[:, :n, 1].transpose(1, 2))


def far(x: Tensor) -> Hosted:
    """The last head starts 2^31 elements after the first; what lies between is never touched.

    Untouched pages cost no memory on most systems; on a GPU they do. Do not ``poison`` or ``snapshot`` such
    a host.
    """
    b, h, n, d = x.shape
    step = -(-(2**31) // max(h - 1, 1))
    whole = torch.empty((b * h - 1) * step + n * d, dtype=x.dtype, device=x.device)
    view = torch.as_strided(whole, (b, h, n, d), (h * step, step, d, 1))
    view.copy_(x)
    return Hosted(view, whole)


LAYOUTS: dict[str, Callable[[Tensor], Hosted]] = {
    "guarded": guarded,
    "padded": padded,
    "interleaved": interleaved,
    "transposed": transposed,
    "packed": packed,
}


def hosted(problem: Problem, layout: str) -> tuple[Problem, dict[str, Hosted]]:
    """The problem with q, k, v, and a mask and a bias that are not broadcast, moved into larger
    allocations; and their hosts by name."""
    tensors = {"q": problem.q, "k": problem.k, "v": problem.v}
    for name in ("mask", "bias"):
        x = getattr(problem, name)
        if x is not None:
            tensors[name] = x
    hosts = {name: LAYOUTS[layout](x) for name, x in tensors.items()}
    return problem.replaced(**{name: host.view for name, host in hosts.items()}), hosts
