"""Which keys the faulty kernel lets a query see: the contract's masks, and faults in each of them."""

from __future__ import annotations

import torch
from torch import Tensor

from flashcheck import masks
from flashcheck.mutants.switches import Switches
from flashcheck.problem import Problem


def visibility(problem: Problem, on: Switches) -> Tensor:
    """Boolean (B, H, Nq, Nk)."""
    parts = [
        _segments(problem, on),
        _causal(problem, on),
        _window(problem, on),
        _padding(problem, on),
        _dense(problem, on),
    ]
    rows = torch.arange(problem.num_queries)
    sizes = (problem.batch, problem.num_heads, rows, problem.num_keys)
    seen = torch.ones(sizes[0], sizes[1], len(rows), sizes[3], dtype=torch.bool)
    for part in parts:
        if part is not None:
            seen = seen & masks.dense(part, *sizes)
    causal, explicit = parts[1], parts[4]
    if causal is not None and explicit is not None and on("mask-or-causal"):
        seen = seen | masks.dense(explicit, *sizes) | masks.dense(causal, *sizes)
    return seen


def _segments(p: Problem, on: Switches) -> masks.Mask | None:
    if p.cu_seqlens_q is None or p.cu_seqlens_k is None:
        return None
    if on("segments-ignored"):
        return None
    return masks.Segments(p.cu_seqlens_q, p.cu_seqlens_k)


def _causal(p: Problem, on: Switches) -> masks.Mask | None:
    if p.causal is None:
        return None
    diagonal = p.diagonal(p.causal)
    if p.causal == "bottom_right" and on("causal-top-left"):
        diagonal = p.diagonal("top_left")
    if on("causal-strict"):
        return masks.Window(diagonal, None, 0) & ~_Equal(diagonal)
    if on("causal-one-extra"):
        return masks.Window(diagonal, None, 1)
    return masks.Causal(diagonal)


class _Equal(masks.Mask):
    """Keys on the diagonal; inverted: all others."""

    def __init__(self, diagonal: masks.Diagonal, inverted: bool = False) -> None:
        self.diagonal, self.inverted = diagonal, inverted

    def __invert__(self) -> _Equal:
        return _Equal(self.diagonal, not self.inverted)

    def visible(self, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:  # noqa: ARG002
        return (j == self.diagonal.key_of(i)) ^ self.inverted


def _window(p: Problem, on: Switches) -> masks.Mask | None:
    if p.window is None:
        return None
    left, right = p.window
    alignment = p.window_alignment
    if left is not None and on("window-one-extra"):
        left = left + 1
    if left is not None and left > 0 and on("window-one-short"):
        left = left - 1
    if right is not None and on("window-right-ignored"):
        right = None
    if on("window-other-diagonal"):
        alignment = "top_left" if alignment == "bottom_right" else "bottom_right"
    return masks.Window(p.diagonal(alignment), left, right)


def _padding(p: Problem, on: Switches) -> masks.Mask | None:
    if p.key_lengths is None:
        return None
    lengths = p.key_lengths
    if on("lengths-of-first-batch"):
        lengths = lengths[:1].expand(p.batch)
    if on("lengths-one-extra"):
        lengths = (lengths + 1).clamp(max=p.num_keys)
    return masks.KeyPadding(lengths)


def _dense(p: Problem, on: Switches) -> masks.Mask | None:
    if p.mask is None:
        return None
    matrix = p.mask
    if matrix.shape[0] > 1 and on("mask-of-first-batch"):
        matrix = matrix[:1]
    if matrix.shape[1] > 1 and on("mask-of-first-head"):
        matrix = matrix[:, :1]
    if on("mask-inverted"):
        matrix = ~matrix
    return masks.Dense(matrix)


def first_tile_of_window(p: Problem, on: Switches, tile: int) -> int | None:
    """First key that is visited at all, where the visited range is rounded to the wrong side."""
    if p.window is None or p.window[0] is None or not on("window-start-tile-skipped"):
        return None
    start = int(p.diagonal(p.window_alignment).key_of(torch.tensor(p.num_queries - 1))) - p.window[0]
    return -(-max(start, 0) // tile) * tile
