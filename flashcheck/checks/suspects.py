"""Faulty rules as problems: what a kernel with a well-known mistake would compute exactly.

Each suspect restates a mistake as another legal problem, so that the oracle and the bound, unchanged,
say what such a kernel returns. The texts name the mistake as its author would want to read it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from flashcheck.oracle.quantities import ForwardQuantities
from flashcheck.problem import Problem

TILES = (16, 32, 64, 128)


@dataclass(frozen=True, slots=True)
class Suspect:
    """A mistake.

    Attributes:
        text: for the report.
        problem: what a kernel that makes it computes.
        kind: the class of the mistake; one guess of a class is enough.
        row_factor: (B, H, Nq) that multiplies its output, or None.
    """

    text: str
    problem: Problem
    kind: str
    row_factor: Tensor | None = None


def suspects(problem: Problem, exact: ForwardQuantities) -> Iterator[Suspect]:
    """All suspects that differ from ``problem``, the likely ones first."""
    yield from _scales(problem)
    yield from _causality(problem)
    yield from _heads(problem)
    yield from _ignored(problem)
    yield from _windows(problem)
    yield from _added(problem)
    yield from _tails(problem, exact)
    yield from _lost_tiles(problem, exact)
    yield from _rescaling(problem, exact)


def _scales(problem: Problem) -> Iterator[Suspect]:
    scale = problem.effective_scale
    default = 1 / math.sqrt(problem.head_dim)
    rules = {
        "the scale is ignored (1/sqrt(dim) is used)": default,
        "the scale is not applied (1 is used)": 1.0,
        "the scale is applied twice": scale * scale,
        "the sign of the scale is lost": abs(scale),
        "exp2 is taken of scores that were not multiplied by log2(e)": scale * math.log(2.0),
        "scores are multiplied by log2(e) before a natural exponential": scale / math.log(2.0),
        "the scale is 1/dim": 1.0 / problem.head_dim,
        "the scale is computed from the value dim": 1 / math.sqrt(problem.value_dim),
    }
    for text, other in rules.items():
        if other != scale:
            yield Suspect(text, problem.replaced(scale=other, q_descale=1.0, k_descale=1.0), "scale")


def _with_mask(problem: Problem, visible: Tensor) -> Problem:
    """The problem under one dense mask in the place of everything that hides keys."""
    return problem.replaced(
        mask=visible, causal=None, window=None, key_lengths=None, cu_seqlens_q=None, cu_seqlens_k=None
    )


def _causality(problem: Problem) -> Iterator[Suspect]:
    if problem.causal is None:
        return
    other = "bottom_right" if problem.causal == "top_left" else "top_left"
    if problem.num_queries != problem.num_keys:
        text = f"causal={problem.causal} is treated as {other}"
        yield Suspect(text, problem.replaced(causal=other), "causal")
    without = problem.replaced(causal=None).visible()
    aligned = problem.diagonal(problem.causal).key_of(torch.arange(problem.num_queries)).view(1, 1, -1, 1)
    keys = torch.arange(problem.num_keys)
    for step, text in ((1, "sees one key past the diagonal"), (-1, "does not see the key on the diagonal")):
        shifted = _with_mask(problem, without & (keys <= aligned + step))
        yield Suspect(f"causal masking is off by one: a row {text}", shifted, "causal")
    yield Suspect("causal masking is ignored", problem.replaced(causal=None), "causal")


def _heads(problem: Problem) -> Iterator[Suspect]:
    if problem.group == 1 or problem.num_kv_heads == 1:
        return
    tiled = torch.arange(problem.num_heads) % problem.num_kv_heads
    yield Suspect(
        "query head h reads key/value head h mod num_kv_heads, not h // group",
        problem.replaced(k=problem.k[:, tiled], v=problem.v[:, tiled]),
        "heads",
    )


def _ignored(problem: Problem) -> Iterator[Suspect]:
    for option in ("window", "mask", "bias", "alibi_slopes", "softcap", "sink", "key_lengths"):
        if getattr(problem, option) is not None:
            yield Suspect(f"option {option} is ignored", problem.replaced(**{option: None}), option)


def _windows(problem: Problem) -> Iterator[Suspect]:
    """Edges of windows and lengths that are off by one, or counted from elsewhere."""
    if problem.window is not None:
        left, right = problem.window
        others = {
            "reaches one key further left": (None if left is None else left + 1, right),
            "is one key short on the left": (None if left is None else max(0, left - 1), right),
            "reaches one key further right": (left, None if right is None else right + 1),
            "is one key short on the right": (left, None if right is None else max(0, right - 1)),
            "has no left side": (None, right),
            "has no right side": (left, None),
        }
        for text, window in others.items():
            if window != problem.window:
                yield Suspect(f"the window {text}", problem.replaced(window=window), "window")
    if problem.key_lengths is not None:
        lengths = problem.key_lengths
        keys = torch.arange(problem.num_keys)
        bare = problem.replaced(key_lengths=None)
        for text, other in (
            ("one key past the length is seen", lengths + 1),
            ("the last key of the length is not seen", lengths - 1),
            ("all batches use the first one's length", lengths[:1].expand_as(lengths)),
        ):
            seen = bare.visible() & (keys < other.view(-1, 1, 1, 1))
            yield Suspect(text, _with_mask(bare, seen), "key_lengths")


def _added(problem: Problem) -> Iterator[Suspect]:
    """What is added to scores or to the row sum: by the wrong factor, or read from the wrong place."""
    p = problem
    if p.bias is not None and p.effective_scale != 1:
        text = "the scale is applied after the bias was added"
        yield Suspect(text, p.replaced(bias=p.bias.double() * p.effective_scale), "bias")
    for name in ("bias", "mask"):
        x = getattr(p, name)
        if x is None:
            continue
        for axis, what in enumerate(("batch", "head", "row")):
            if x.shape[axis] > 1:
                first = p.replaced(**{name: x.narrow(axis, 0, 1).expand_as(x)})
                yield Suspect(f"the {name} of the first {what} is read for all", first, name)
    if p.mask is not None:
        yield Suspect("the mask hides where it should show", p.replaced(mask=~p.mask), "mask")
    if p.alibi_slopes is not None:
        yield Suspect("the sign of ALiBi is wrong", p.replaced(alibi_slopes=-p.alibi_slopes), "alibi_slopes")
    if p.sink is not None:
        twice = p.replaced(sink=p.sink.double() + math.log(2.0))
        yield Suspect("the sink counts twice", twice, "sink")
    for name, words in (("alibi_slopes", "ALiBi slope"), ("sink", "sink")):
        x = getattr(p, name)
        if x is not None and x.shape[-1] > 1:
            neighbour = p.replaced(**{name: torch.roll(x, -1, -1)})
            yield Suspect(f"every head reads its neighbour's {words}", neighbour, name)


def _tails(problem: Problem, exact: ForwardQuantities) -> Iterator[Suspect]:
    if {"bias", "alibi_slopes", "cu_seqlens"} & set(problem.options()):
        return
    for tile in TILES:
        extra = -problem.num_keys % tile
        if extra:
            k, v = (torch.nn.functional.pad(x, (0, 0, 0, extra)) for x in (problem.k, problem.v))
            seen = torch.nn.functional.pad(exact.visible, (0, extra), value=True)
            counted = problem.replaced(k=k, v=v, mask=seen, causal=None, window=None, key_lengths=None)
            yield Suspect(
                f"the {extra} padding keys of the last tile of {tile} count as zeros", counted, "tail counted"
            )


def _lost_tiles(problem: Problem, exact: ForwardQuantities) -> Iterator[Suspect]:
    keys = torch.arange(problem.num_keys)
    for tile in reversed(TILES):
        whole = problem.num_keys // tile * tile
        if 0 < whole < problem.num_keys:
            text = f"the ragged tail (keys {whole}..{problem.num_keys - 1}, tile {tile}) is lost"
            yield Suspect(text, _with_mask(problem, exact.visible & (keys < whole)), "lost")
        for start in range(0, whole, tile):
            if whole == tile == problem.num_keys:
                continue
            inside = (keys >= start) & (keys < start + tile)
            text = f"the tile of keys {start}..{start + tile - 1} is lost"
            yield Suspect(text, _with_mask(problem, exact.visible & ~inside), "lost")


def _rescaling(problem: Problem, exact: ForwardQuantities) -> Iterator[Suspect]:
    """Weights exp(s - running maximum) that are never rescaled: a bias of m - running maximum."""
    for tile in TILES:
        tiles = -(-problem.num_keys // tile)
        if tiles < 2:
            continue
        padded = torch.nn.functional.pad(exact.scores, (0, tiles * tile - problem.num_keys), value=-torch.inf)
        running = torch.unflatten(padded, -1, (tiles, tile)).amax(-1).cummax(-1).values
        running = running.repeat_interleave(tile, -1)[..., : problem.num_keys]
        behind = torch.where(torch.isneginf(running), 0.0, exact.row_max.unsqueeze(-1) - running)
        behind = behind.nan_to_num(0.0, 0.0, 0.0)
        if not bool((behind > 0).any()) or float(behind.max()) > 80:
            continue
        bias = behind if problem.bias is None else problem.bias.double() + behind
        unscaled = problem.replaced(bias=bias)
        yield Suspect(
            f"neither O nor the row sum is rescaled when the maximum grows (tile {tile})",
            unscaled,
            "rescaling",
        )
        grown = torch.exp(exact.scores - exact.row_max.unsqueeze(-1) + behind).sum(-1) / exact.row_sum
        yield Suspect(
            f"O is not rescaled when the maximum grows (tile {tile})",
            unscaled,
            "rescaling",
            grown.nan_to_num(1.0),
        )
