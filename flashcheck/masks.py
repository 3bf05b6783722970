"""Which keys a query sees: one predicate over (batch, head, query, key), from which all else is derived.

A mask answers ``visible(b, h, i, j)`` for index tensors that broadcast; the dense matrix is that
predicate on a grid and nothing else, so no second statement of a mask exists that could disagree.
Masks combine by ``&`` and ``|``.

Diagonals. The key aligned with query i is ``i`` (top left) or ``i + Nk - Nq`` (bottom right); in
packed batches the same holds inside each segment. Causality and windows both count from it
(design contract, points 1 and 2).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Alignment = Literal["top_left", "bottom_right"]
ALIGNMENTS: tuple[Alignment, ...] = ("top_left", "bottom_right")


class Mask:
    """Base of all masks; subclasses implement ``visible``."""

    def visible(self, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        """True where query i of head h in batch b sees key j.

        Args:
            b, h, i, j: integer tensors that broadcast against each other.

        Returns:
            A boolean tensor that broadcasts to the common shape.
        """
        raise NotImplementedError

    def __and__(self, other: Mask) -> Mask:
        return And(self, other)

    def __or__(self, other: Mask) -> Mask:
        return Or(self, other)


@dataclass(frozen=True, eq=False)
class Everything(Mask):
    """Every key is visible."""

    def visible(self, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        # torch.broadcast_shapes takes a millisecond, a hundred times as long.
        whole = torch.broadcast_tensors(b, h, i, j)[0]  # type: ignore[no-untyped-call]
        return torch.ones(whole.shape, dtype=torch.bool)


@dataclass(frozen=True, eq=False)
class And(Mask):
    """Visible where both masks say so."""

    left: Mask
    right: Mask

    def visible(self, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return self.left.visible(b, h, i, j) & self.right.visible(b, h, i, j)


@dataclass(frozen=True, eq=False)
class Or(Mask):
    """Visible where either mask says so."""

    left: Mask
    right: Mask

    def visible(self, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return self.left.visible(b, h, i, j) | self.right.visible(b, h, i, j)


@dataclass(frozen=True, slots=True)
class Diagonal:
    """Where the diagonal runs: ``key_of(i)`` is the key aligned with query i.

    Attributes:
        num_queries, num_keys: Nq and Nk of the padded tensors.
        alignment: ``"top_left"`` or ``"bottom_right"``.
        cu_seqlens_q, cu_seqlens_k: cumulative segment lengths of a packed batch (int tensors of
            length segments + 1), or None. With them the diagonal restarts in every segment.
    """

    num_queries: int
    num_keys: int
    alignment: Alignment
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_k: Tensor | None = None

    def key_of(self, i: Tensor) -> Tensor:
        """Index of the key aligned with query ``i``; may lie outside [0, Nk)."""
        if self.cu_seqlens_q is None or self.cu_seqlens_k is None:
            shift = self.num_keys - self.num_queries if self.alignment == "bottom_right" else 0
            return i + shift
        segment = segment_of(i, self.cu_seqlens_q)
        start_q, end_q = self.cu_seqlens_q[segment], self.cu_seqlens_q[segment + 1]
        start_k, end_k = self.cu_seqlens_k[segment], self.cu_seqlens_k[segment + 1]
        aligned = i - start_q + start_k
        if self.alignment == "bottom_right":
            aligned = aligned + (end_k - start_k) - (end_q - start_q)
        return aligned


def segment_of(index: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Segment that holds each index of a packed tensor; empty segments hold none."""
    return torch.searchsorted(cu_seqlens[1:].contiguous(), index.contiguous(), right=True).clamp(
        max=max(len(cu_seqlens) - 2, 0)
    )


@dataclass(frozen=True, eq=False)
class Causal(Mask):
    """Keys up to and including the diagonal."""

    diagonal: Diagonal

    def visible(self, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return j <= self.diagonal.key_of(i)


@dataclass(frozen=True, eq=False)
class Window(Mask):
    """Keys from ``left`` before the diagonal to ``right`` after it, both ends included; None: no limit."""

    diagonal: Diagonal
    left: int | None
    right: int | None

    def visible(self, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        aligned = self.diagonal.key_of(i)
        seen = torch.ones_like(i + j, dtype=torch.bool)
        if self.left is not None:
            seen = seen & (j >= aligned - self.left)
        if self.right is not None:
            seen = seen & (j <= aligned + self.right)
        return seen


@dataclass(frozen=True, eq=False)
class KeyPadding(Mask):
    """The first ``lengths[b]`` keys of batch b; the rest is padding."""

    lengths: Tensor

    def visible(self, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return j < self.lengths[b]


@dataclass(frozen=True, eq=False)
class Segments(Mask):
    """Packed sequences: a query sees the keys of its own segment."""

    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor

    def visible(self, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        segment = segment_of(i, self.cu_seqlens_q)
        return (j >= self.cu_seqlens_k[segment]) & (j < self.cu_seqlens_k[segment + 1])


@dataclass(frozen=True, eq=False)
class Dense(Mask):
    """A boolean tensor (batch or 1, heads or 1, Nq or 1, Nk or 1); True means visible."""

    matrix: Tensor

    def visible(self, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        index = (b, h, i, j)
        zero = torch.zeros((), dtype=torch.int64)
        picked = tuple(x if n > 1 else zero for x, n in zip(index, self.matrix.shape, strict=True))
        return self.matrix[picked]


def dense(mask: Mask, batch: int, heads: int, rows: Tensor, num_keys: int) -> Tensor:
    """The predicate on a grid: boolean (batch, heads, len(rows), num_keys).

    ``rows`` holds query indices, so that long problems can be taken in row blocks.
    """
    b = torch.arange(batch).view(-1, 1, 1, 1)
    h = torch.arange(heads).view(1, -1, 1, 1)
    i = rows.view(1, 1, -1, 1)
    j = torch.arange(num_keys).view(1, 1, 1, -1)
    shape = (batch, heads, len(rows), num_keys)
    if 0 in shape:
        return torch.zeros(shape, dtype=torch.bool)
    return mask.visible(b, h, i, j).expand(shape)
