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
