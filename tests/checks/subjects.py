"""A small honest kernel in plain torch, with switches that make it wrong in one way each.

It shares no code with the checker beyond the problem it is given: scores in fp32, one tile, P rounded
into the input format, row sums unrounded.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from flashcheck.arithmetic import flash
from flashcheck.kernel import Capabilities, ForwardResult, Kernel
from flashcheck.problem import Problem

CAPABILITIES = Capabilities(
    dtypes=("fp16", "bf16", "fp32"),
    options=("scale", "causal", "mask"),
    causal=("top_left", "bottom_right"),
    value_dim_differs=True,
    gqa=True,
    lse=True,
    empty_rows=True,
    devices=("cpu",),
)


def attend(
    problem: Problem,
    *,
    scale_factor: float = 1.0,
    round_twice: bool = False,
    shift: int = 0,
    tiled_heads: bool = False,
    lse_factor: float = 1.0,
    lost_keys: tuple[int, int] | None = None,
) -> ForwardResult:
    """Attention in fp32 with the chosen faults; honest by default."""
    q, k, v = problem.q.float(), problem.k.float(), problem.v.float()
    heads = torch.arange(problem.num_heads)
    source = heads % problem.num_kv_heads if tiled_heads else heads // problem.group
    k, v = k[:, source], v[:, source]
    scale = problem.scale if problem.scale is not None else 1.0 / math.sqrt(problem.head_dim)
    s = (q @ k.transpose(-1, -2)) * (scale * scale_factor)
    visible = _visible(problem, shift)
    if lost_keys is not None:
        visible[..., slice(*lost_keys)] = False
    s = s.masked_fill(~visible, -torch.inf)
    top = s.amax(-1, keepdim=True) if s.shape[-1] else s.new_full((*s.shape[:-1], 1), -torch.inf)
    base = torch.where(torch.isneginf(top), 0.0, top)
    p = torch.exp(s - base)
    total = p.sum(-1, keepdim=True)
    p = p.to(problem.q.dtype)
    if round_twice:  # through one bit fewer
        p = (p.float() * 3.0).to(problem.q.dtype).float().div(3.0).to(problem.q.dtype)
    # A row of scores that all overflowed to -inf sees keys: NaN, not 0.
    out = (p.float() @ v) / torch.where(visible.any(-1, keepdim=True), total, 1.0)
    lse = (base + torch.log(total)).squeeze(-1) * lse_factor
    return ForwardResult(out.to(problem.q.dtype), lse)


def _visible(problem: Problem, shift: int) -> Tensor:
    i = torch.arange(problem.num_queries).view(-1, 1)
    j = torch.arange(problem.num_keys).view(1, -1)
    shape = (problem.batch, problem.num_heads, problem.num_queries, problem.num_keys)
    visible = torch.ones(shape, dtype=torch.bool)
    if problem.causal is not None:
        offset = problem.num_keys - problem.num_queries if problem.causal == "bottom_right" else 0
        visible &= j <= i + offset + shift
    if problem.mask is not None:
        visible &= problem.mask
    return visible


def kernel(forward: Callable[[Problem], ForwardResult] = attend, **changes: object) -> Kernel:
    """A Kernel around ``forward``; ``changes`` replace capabilities."""
    from dataclasses import replace

    return Kernel(
        name="subject",
        forward=forward,
        capabilities=replace(CAPABILITIES, **changes),  # type: ignore[arg-type]
        arithmetic=lambda problem: flash(problem.format, scale_placement="scores"),
    )
