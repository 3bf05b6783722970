"""Orders that the kernels may choose freely, for a checker: inside, they are drawn from a seed.

Each yields a list that gets an entry for whatever came in another order than usual.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


@contextmanager
def launches(seed: int) -> Iterator[list[int]]:
    """The programs of every launch run in another order; in the interpreter only, a GPU orders its own.

    Entries are numbers of programs of a launch. A launch of one program has no other order.
    """
    from triton.runtime.interpreter import InterpreterBuilder

    rng, moved = random.Random(seed), []
    set_grid_dim, set_grid_idx = InterpreterBuilder.set_grid_dim, InterpreterBuilder.set_grid_idx
    orders: dict[int, list[int]] = {}

    def dim(self: Any, *sizes: int) -> None:
        set_grid_dim(self, *sizes)
        count = math.prod(sizes)
        order = rng.sample(range(count), count)
        if count > 1 and order == sorted(order):
            order.reverse()
        orders[id(self)] = order
        if count > 1:
            moved.append(count)

    def index(self: Any, x: int, y: int, z: int) -> None:
        _, columns, layers = self.grid_dim
        place = orders[id(self)][(x * columns + y) * layers + z]
        set_grid_idx(self, place // (columns * layers), place // layers % columns, place % layers)

    InterpreterBuilder.set_grid_dim, InterpreterBuilder.set_grid_idx = dim, index
    try:
        yield moved
    finally:
        InterpreterBuilder.set_grid_dim, InterpreterBuilder.set_grid_idx = set_grid_dim, set_grid_idx


_page_orders: list[tuple[random.Random, list[int]]] = []


@contextmanager
def pages(seed: int) -> Iterator[list[int]]:
    """Caches given to the declared forward of `flash_decode` are scattered over pages, all else NaN.

    Entries are numbers of pages.
    """
    moved: list[int] = []
    _page_orders.append((random.Random(seed), moved))
    try:
        yield moved
    finally:
        _page_orders.pop()


def in_pages(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor] | None:
    """k and v (batch, kv heads, Nk, dim) as pages, and their block table; None outside of `pages`.

    The page size divides Nk, so that the capacity, by which keys are split among programs, stays.
    """
    if not _page_orders or not k.shape[2]:
        return None
    rng, moved = _page_orders[-1]
    batch, heads, length, _ = k.shape
    size = rng.choice([n for n in range(1, length + 1) if length % n == 0])
    count = length // size
    places = rng.sample(range(batch * count + 2), batch * count)
    table = torch.tensor(places, device=k.device).view(batch, count)

    def scattered(x: Tensor) -> Tensor:
        whole = torch.full((batch * count + 2, heads, size, x.shape[3]), math.nan, device=x.device)
        whole = whole.to(x.dtype)
        by_page = x.reshape(batch, heads, count, size, x.shape[3])
        whole[table.flatten()] = by_page.transpose(1, 2).flatten(0, 1)
        return whole

    moved.append(batch * count)
    return scattered(k), scattered(v), table
