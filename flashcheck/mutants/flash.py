"""One small flash attention forward in torch whose faults are switches; no switch: the control.

Float32 arithmetic, key tiles of ``TILE`` ascending, padded to full width as kernels pad them, P rounded
into the input format, row sums over the unrounded P. The faulty lines are the ones under ``on(...)``.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from flashcheck.formats import BF16, E4M3, FP16, Format, round_nearest, round_toward_zero
from flashcheck.kernel import ForwardResult
from flashcheck.mutants.scores import scale_of, score_tile
from flashcheck.mutants.stores import finish
from flashcheck.mutants.switches import Switches, kept
from flashcheck.mutants.visibility import first_tile_of_window, visibility
from flashcheck.problem import Problem

TILE = 16


@dataclass(frozen=True, slots=True)
class State:
    """Running maximum and row sum (B, H, Nq), unnormalised output (B, H, Nq, dv); float32."""

    m: Tensor
    row_sum: Tensor
    acc: Tensor


class FlashForward:
    """The forward pass as an object: some faults remember earlier calls.

    Args:
        on: the faults.
        splits: parts of the key range that are computed apart and merged.
    """

    def __init__(self, on: Switches, splits: int = 1) -> None:
        self.on, self.splits = on, splits
        self._scales: dict[tuple[object, ...], float] = {}
        self._softcap: float | None = None
        self._calls = 0
        self._launch: random.Random | None = None
        self._moved: list[int] = []

    @contextmanager
    def launches(self, seed: int) -> Iterator[list[int]]:
        """Inside, the query tiles of a head are programs that run in another order."""
        self._launch, self._moved = random.Random(seed), []
        try:
            yield self._moved
        finally:
            self._launch = None

    def _tickets(self, p: Problem) -> Tensor:
        """Per query row: which of its head's programs, in the order in which they run, computes it."""
        count = -(-p.num_queries // TILE)
        order = list(range(count))
        if self._launch is not None and count > 1:
            self._launch.shuffle(order)
            self._moved.append(count)
        return torch.tensor(order).repeat_interleave(TILE)[: p.num_queries]

    def __call__(self, problem: Problem) -> ForwardResult:
        self._calls += 1
        if not self.on("illegal-accepted"):
            problem = problem.replaced()  # checks the arguments again, whoever made the problem
        if problem.softcap is not None and self.on("softcap-cached"):
            self._softcap = self._softcap or problem.softcap
            problem = problem.replaced(softcap=self._softcap)
        seen = visibility(problem, self.on)
        tiles = self._tiles(problem)
        share = max(1, -(-len(tiles) // self.splits))
        states = [self._run(problem, seen, tiles[i * share : (i + 1) * share]) for i in range(self.splits)]
        if self.splits > 1 and self.on("split-stale-scratch"):
            states = [s if tiles[i * share :] else _stale(s) for i, s in enumerate(states)]
        return finish(problem, self._merged(states), seen, self.on)

    def _tiles(self, p: Problem) -> list[slice]:
        starts = list(range(0, p.num_keys, TILE))
        if p.num_keys % TILE and len(starts) > 1 and self.on("lost-tile"):
            starts.pop()
        skip_to = first_tile_of_window(p, self.on, TILE)
        if skip_to is not None:
            starts = [s for s in starts if s >= skip_to]
        if self.on("order-random"):
            order = torch.randperm(len(starts), generator=torch.Generator().manual_seed(self._calls))
            starts = [starts[i] for i in order.tolist()]
        return [slice(s, min(s + TILE, p.num_keys)) for s in starts]

    def _run(self, p: Problem, seen: Tensor, tiles: list[slice]) -> State:
        on = self.on
        scale = scale_of(p, on, self._scales)
        heads = _key_heads(p, on)
        q, k, v = p.q.float(), p.k.float()[:, heads], p.v.float()[:, heads]
        near = -(-(2**31) // max(p.q.stride(1), 1))  # heads whose offset does not wrap
        if near < p.num_heads and on("offset-32-bits"):
            q = torch.cat([q[:, :near], q[:, :1].expand(-1, p.num_heads - near, -1, -1)], 1)
        if on("value-fixed-point"):
            v = torch.round(v * 2.0**26) / 2.0**26
        if on("value-range-clipped"):
            v = v.clamp(-0.75, 0.75)
        if scale < 0 and on("max-before-scale-sign"):
            return _wrong_sign(p, q, k, v, scale, seen)
        state = _start(p, on)
        floor = state.m
        tickets = self._tickets(p)
        for keys in tiles:
            shown = pad(seen[..., keys], (0, TILE - (keys.stop - keys.start)))
            if p.num_keys < keys.start + TILE and p.causal is None and on("key-tail-counted"):
                shown[..., keys.stop - keys.start :] = True
            s = score_tile(p, q, _tile(k, keys), keys, scale, shown, on)
            values = _beyond(p, keys, heads) if on("value-tail-unmasked") else _tile(v, keys)
            if on("hidden-key-in-max"):  # any maximum gives the right answer, up to rounding
                everything = score_tile(p, q, _tile(k, keys), keys, scale, torch.ones_like(shown), on)
                floor = everything.amax(-1)
            state = self._step(p, state, s, values, shown, keys.stop == p.num_keys, floor, tickets)
        return state

    def _step(
        self,
        p: Problem,
        state: State,
        s: Tensor,
        v: Tensor,
        shown: Tensor,
        last: bool,
        floor: Tensor,
        tickets: Tensor,
    ) -> State:
        on, fmt = self.on, p.format
        m = torch.maximum(torch.maximum(state.m, s.amax(-1)), floor)
        if on("hidden-value-in-max"):  # an upper limit from the size of V; any limit gives the right answer
            m = torch.where(torch.isneginf(m), m, m + 0.1 * v.abs().amax((-1, -2)).unsqueeze(-1))
        safe = m if on("empty-tile-no-guard") else torch.where(torch.isneginf(m), 0.0, m)
        weights = torch.exp(s - safe.unsqueeze(-1))
        ulps = on.size("exp")
        if ulps is not None:  # both signs, or the row sum would take the error out again
            sign = torch.where(torch.frac(s.abs() * 4097) < 0.5, -1.0, 1.0)
            weights = weights * (1 + ulps * 2.0**-23 * sign)
        factor = kept(torch.exp(state.m - safe), on, "rescale")
        if on("exp-of-nan-is-zero"):
            weights, factor = weights.nan_to_num(nan=0.0), factor.nan_to_num(nan=0.0)
        if on("rescale-bf16"):
            factor = round_nearest(factor.double(), BF16).float()
        rounded = _rounded(weights, fmt, on)
        summand = rounded if on("row-sum-of-rounded") else weights
        l = kept(state.row_sum * factor + summand.sum(-1), on, "row-sum")
        if on("row-sum-16-bit"):
            l = round_nearest(l.double(), FP16 if fmt.name == "fp16" else BF16).float()
        stale = on("no-rescale") or (last and on("no-rescale-in-last-tile"))
        before = state.acc if stale else state.acc * factor.unsqueeze(-1)
        acc = kept(before + _product(rounded, v, shown, on, tickets), on, "accumulator", truncated=True)
        if on("accumulator-fp16"):
            acc = round_nearest(acc.double(), FP16).float()
        if on("accumulator-truncated"):
            acc = round_toward_zero(
                acc.double(), Format("e8m13", 14, -126, 3e38, False, torch.float32)
            ).float()
        return State(m, l, acc)

    def _merged(self, states: list[State]) -> State:
        total = states[0]
        for other in states[1:]:
            total = _merge(total, other, self.on)
        return total


def _merge(one: State, other: State, on: Switches) -> State:
    m = torch.maximum(one.m, other.m)
    safe = torch.where(torch.isneginf(m), 0.0, m)
    if on("merge-two-empties"):
        safe = m
    if on("merge-without-max"):
        m = safe = torch.zeros_like(m)
    first, second = torch.exp(one.m - safe), torch.exp(other.m - safe)
    if on("merge-unweighted"):
        first, second = torch.ones_like(first), torch.ones_like(second)
    acc = one.acc * first.unsqueeze(-1) + other.acc * second.unsqueeze(-1)
    return State(m, one.row_sum * first + other.row_sum * second, acc)


def _start(p: Problem, on: Switches) -> State:
    shape = (p.batch, p.num_heads, p.num_queries)
    first = -5e4 if on("finite-max-start") else -torch.inf
    return State(torch.full(shape, first), torch.zeros(shape), torch.zeros(*shape, p.value_dim))


def _stale(state: State) -> State:
    """Scratch of a split that had nothing to do: finite leftovers of an earlier launch."""
    return State(
        torch.full_like(state.m, 3.0), torch.full_like(state.row_sum, 3.0), torch.full_like(state.acc, 3.0)
    )


def _key_heads(p: Problem, on: Switches) -> Tensor:
    """Key head of every query head."""
    h = torch.arange(p.num_heads)
    if p.num_kv_heads > 1 and on("gqa-tiled-heads"):
        return h % p.num_kv_heads
    if p.num_kv_heads > 1 and on("gqa-swapped-divisor"):
        return (h // p.num_kv_heads).clamp(max=p.num_kv_heads - 1)
    if p.group == 1 and p.num_heads > 1 and on("ungrouped-heads-reversed"):
        return h.flip(0)
    return h // p.group


def _tile(x: Tensor, keys: slice) -> Tensor:
    return pad(x[:, :, keys], (0, 0, 0, TILE - (keys.stop - keys.start)))


def _beyond(p: Problem, keys: slice, heads: Tensor) -> Tensor:
    """The value tile with whatever follows the last row in memory, as an unmasked load reads it."""
    v = p.v
    last = v.untyped_storage().nbytes() // v.element_size() - v.storage_offset()
    tile = torch.zeros(p.batch, p.num_kv_heads, TILE, p.value_dim)
    for b in range(p.batch):
        for h in range(p.num_kv_heads):
            for r in range(TILE):
                offset = b * v.stride(0) + h * v.stride(1) + (keys.start + r) * v.stride(2)
                if offset + (p.value_dim - 1) * v.stride(3) < last:
                    row = torch.as_strided(v, (p.value_dim,), (v.stride(3),), v.storage_offset() + offset)
                    tile[b, h, r] = row.float()
    return tile[:, heads]


def _rounded(weights: Tensor, fmt: Format, on: Switches) -> Tensor:
    """P as it enters the second product."""
    if on("p-e4m3"):
        return round_nearest(weights.double() * 256, E4M3).float() / 256
    if on("p-truncated"):
        return round_toward_zero(weights.double(), fmt).float()
    if on("p-twice"):
        return round_nearest(round_nearest(weights.double() * 0.7, fmt) / 0.7, fmt).float()
    return round_nearest(kept(weights, on, "p").double(), fmt).float()


def _product(p: Tensor, v: Tensor, shown: Tensor, on: Switches, tickets: Tensor) -> Tensor:
    """P V. Values that are not finite are added apart, pair by pair, so that 0 * NaN does not arise in
    rows that do not see them, and no bit of other elements changes."""
    if p.shape[1] > 1 and on("order-by-head"):
        flipped = p.flip(-1) @ v.flip(-2)
        return torch.where((torch.arange(p.shape[1]) % 2 == 1).view(1, -1, 1, 1), flipped, p @ v)
    if on("order-by-ticket"):
        flipped = p.flip(-1) @ v.flip(-2)
        return torch.where((tickets % 2 == 1).view(1, 1, -1, 1), flipped, p @ v)
    finite = torch.isfinite(v)
    if bool(finite.all()) or on("value-tail-unmasked"):
        return p @ v
    pairs = p.unsqueeze(-1) * torch.where(finite, 0.0, v).unsqueeze(-3)
    return p @ torch.where(finite, v, 0.0) + torch.where(shown.unsqueeze(-1), pairs, 0.0).sum(-2)


def _wrong_sign(p: Problem, q: Tensor, k: Tensor, v: Tensor, scale: float, seen: Tensor) -> State:
    """The largest product is taken before it is multiplied by a negative scale, so it is the smallest."""
    products = torch.where(seen, q @ k.mT, -torch.inf)
    m = products.amax(-1) * scale
    m = torch.where(torch.isinf(m), 0.0, m)
    weights = torch.where(seen, torch.exp(products * scale - m.unsqueeze(-1)), 0.0)
    return State(m, weights.sum(-1), round_nearest(weights.double(), p.format).float() @ v)
