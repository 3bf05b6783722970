"""The faulty kernel's epilogue: sink, division, log-sum-exp, stores."""

from __future__ import annotations

import math
from typing import Protocol

import torch
from torch import Tensor

from flashcheck.formats import BF16, Format, round_nearest, round_toward_zero
from flashcheck.kernel import ForwardResult
from flashcheck.mutants.switches import Switches, kept
from flashcheck.problem import Problem

ROW_TILE = 16


class Sums(Protocol):
    """Running maximum and row sum (B, H, Nq), unnormalised output (B, H, Nq, dv)."""

    @property
    def m(self) -> Tensor: ...
    @property
    def row_sum(self) -> Tensor: ...
    @property
    def acc(self) -> Tensor: ...


def finish(problem: Problem, sums: Sums, seen: Tensor, on: Switches) -> ForwardResult:
    """Divides and stores what the tile loop left."""
    m, l, acc = _with_sink(problem, sums, on)
    bare = sums.m + torch.log(sums.row_sum)
    if on("empty-row-div-zero"):
        out = acc / l.unsqueeze(-1)
    else:
        # A row whose scores all overflowed to -inf has a sum of 0 too, and must not become zeros.
        nothing = (l == 0) if on("exp-of-nan-is-zero") else (l == 0) & ~seen.any(-1)
        out = torch.where(nothing.unsqueeze(-1), 0.0, acc * (1 / l).unsqueeze(-1))
    out = out * problem.v_descale
    if on("reciprocal-short"):
        out = out * (1 - 2.0**-11)
    workspace = torch.empty(4096)
    if not on("workspace-never-cleared"):
        workspace.zero_()
    out = torch.where(torch.isnan(workspace).all(), torch.nan, out)  # 0 times what it holds is added
    lse = torch.where(l == 0, -torch.inf, m + torch.log(l))
    if problem.sink is not None and on("lse-without-sink"):
        lse = bare
    lse = kept(lse, on, "lse")
    return ForwardResult(_stored(problem, out, seen, on), _lse(problem, lse, m, seen, on))


def _with_sink(p: Problem, sums: Sums, on: Switches) -> tuple[Tensor, Tensor, Tensor]:
    if p.sink is None or on("sink-ignored"):
        return sums.m, sums.row_sum, sums.acc
    sink = p.sink.float().view(1, -1, 1)
    if on("sink-next-head"):
        sink = sink.roll(1, 1)
    if on("sink-outside-the-max"):  # no rescaling where the sink is the largest: exp overflows
        safe = torch.where(torch.isneginf(sums.m), 0.0, sums.m)
        return safe, sums.row_sum + torch.exp(sink - safe), sums.acc
    m = torch.maximum(sums.m, sink)
    safe = torch.where(torch.isneginf(m), 0.0, m)
    factor = torch.exp(sums.m - safe)
    l = sums.row_sum * factor + torch.exp(sink - safe)
    if on("sink-twice"):
        l = l + torch.exp(sink - safe)
    return m, l, sums.acc * factor.unsqueeze(-1)


def _lse(p: Problem, lse: Tensor, m: Tensor, seen: Tensor, on: Switches) -> Tensor:
    if on("lse-base-2"):
        return lse / math.log(2.0)
    if on("lse-of-bare-products"):
        return lse / (p.effective_scale or 1.0)
    if p.num_keys <= ROW_TILE and on("lse-of-single-tile"):
        return m
    if on("lse-is-max"):
        return m
    if on("lse-negated"):
        return -lse
    if on("lse-bf16"):
        return round_nearest(lse.double(), BF16).float()
    empty = ~seen.any(-1)
    if bool(empty.any()) and on("empty-row-lse-inf"):
        return torch.where(empty, torch.inf, lse)
    if bool(empty.any()) and on("empty-row-lse-zero"):
        return torch.where(empty, 0.0, lse)
    return lse


def _stored(p: Problem, out: Tensor, seen: Tensor, on: Switches) -> Tensor:
    fmt: Format = p.format
    if on("nan-swallowed"):
        out = out.nan_to_num(nan=0.0, posinf=fmt.max_finite, neginf=-fmt.max_finite)
    whole = p.num_queries // ROW_TILE * ROW_TILE
    if whole < p.num_queries and on("rows-zeroed"):
        out = out.clone()
        out[:, :, whole:] = 0
    if p.num_heads > 1 and whole < p.num_queries and on("store-spills-to-next-head"):
        out = _spilled(out, p.num_queries - whole)
    empty = ~seen.any(-1)
    if bool(empty.any()) and on("empty-row-copies-value"):
        first = p.v[:, :, :1].float().repeat_interleave(p.group, 1)
        out = torch.where(empty.unsqueeze(-1), first, out)
    if on("output-truncated"):
        return round_toward_zero(out.double(), fmt).to(fmt.dtype)
    if on("output-through-bf16"):
        out = round_nearest(out.double(), BF16).float()
    if on("value-dim-last-lost"):
        out = out.clone()
        out[..., -1] = 0
    return round_nearest(kept(out, on, "output").double(), fmt).to(fmt.dtype)


def _spilled(out: Tensor, rest: int) -> Tensor:
    """Heads are stored last to first; each whole tile covers the next head's first rows with padding."""
    out = out.clone()
    rows = min(ROW_TILE - rest, out.shape[2])
    out[:, 1:, :rows] = out[:, :-1, -1:].expand(-1, -1, rows, -1)
    return out
