"""Reduces a failing problem to fewer tokens, heads and dims, fewer options, and the simplest values.

Hypothesis shrinks the spec, in which values follow from a seed; here the tensors themselves are cut. A
change stays when the case still fails in the same group. Greedy, to a fixed point or the end of the time.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from flashcheck.errors import ArgumentError
from flashcheck.fuzz.case import FuzzCase, problem_to_json
from flashcheck.kernel import Capabilities
from flashcheck.problem import Problem

Fails = Callable[[Problem], bool]

_AXES = {
    "q": (0, 1, 2, 3),
    "k": (0, None, 4, 3),
    "v": (0, None, 4, 5),
    "dout": (0, 1, 2, 5),
    "dlse": (0, 1, 2),
}
"""Tensor -> which size each dimension is: batch 0, heads 1, Nq 2, dim 3, Nk 4, value dim 5."""

_OPTIONAL = ("mask", "bias", "alibi_slopes", "softcap", "sink", "key_lengths", "window", "causal", "dlse")


def as_case(problem: Problem, origin: FuzzCase) -> FuzzCase:
    """The problem by its tensors; sizes of the spec follow, so that cases compare by size."""
    sizes = {
        "batch": problem.batch,
        "num_heads": problem.num_heads,
        "num_kv_heads": problem.num_kv_heads,
        "num_queries": problem.num_queries,
        "num_keys": problem.num_keys,
        "head_dim": problem.head_dim,
        "value_dim": problem.value_dim,
    }
    spec = replace(
        origin.spec,
        **sizes,  # type: ignore[arg-type]
        scale=problem.scale,
        causal=problem.causal,
        window=problem.window,
        mask=origin.spec.mask if problem.mask is not None else None,
        bias=problem.bias is not None,
        alibi=problem.alibi_slopes is not None,
        softcap=problem.softcap,
        sink=problem.sink is not None,
        key_lengths=None if problem.key_lengths is None else tuple(problem.key_lengths.tolist()),
    )
    return FuzzCase(
        spec, origin.checks, json.dumps(problem_to_json(problem.replaced(family="reduced", seed=0)))
    )


def reduced(problem: Problem, fails: Fails, capabilities: Capabilities, seconds: float) -> Problem:
    """A problem that still fails, at most as large; ``problem`` itself where nothing can be cut."""
    until = time.monotonic() + seconds

    def tries(candidate: Problem) -> bool:
        return _legal(candidate, capabilities) and fails(candidate)

    best, changed = problem, True
    while changed and time.monotonic() < until:
        changed = False
        for stage in (_without_options, _smaller, _simpler):
            position = 0
            while time.monotonic() < until:
                # Resumed where the last success was: what failed before it will mostly fail again.
                candidates = list(stage(best))
                hit = next(
                    (
                        i
                        for i in range(position, len(candidates))
                        if time.monotonic() < until and tries(candidates[i]())
                    ),
                    None,
                )
                if hit is None:
                    break
                best, changed, position = candidates[hit](), True, hit
    return best


def _legal(problem: Problem, capabilities: Capabilities) -> bool:
    if problem.num_queries < 1 or problem.num_heads < 1 or capabilities.refuses(problem) is not None:
        return False
    return capabilities.empty_rows or bool(problem.visible().any(-1).all())


Candidates = Iterator[Callable[[], Problem]]


def _without_options(p: Problem) -> Candidates:
    for name in _OPTIONAL:
        if getattr(p, name) is not None:
            yield _change(p, {name: None})
    if p.cu_seqlens_q is not None:
        yield _change(p, {"cu_seqlens_q": None, "cu_seqlens_k": None})
    for scale in (None, 1.0):
        if p.scale not in (scale, 1.0):
            yield _change(p, {"scale": scale})


def _change(p: Problem, changes: dict[str, Any]) -> Callable[[], Problem]:
    return lambda: _or_same(p, changes)


def _or_same(p: Problem, changes: dict[str, Any]) -> Problem:
    try:
        return p.replaced(**changes)
    except ArgumentError:
        return p.replaced(q=p.q[:, :, :0])  # illegal: `_legal` turns it down


def _smaller(p: Problem) -> Candidates:
    if p.cu_seqlens_q is not None:
        return  # cutting tokens would have to move the ends of the segments too
    for axis, size in ((0, p.batch), (1, p.num_kv_heads), (4, p.num_keys), (2, p.num_queries)):
        for kept in _subsets(size):
            yield _keeping(p, axis, kept)
    if p.group > 1:
        for kept in _subsets(p.group):
            yield _keeping(p, 6, kept)
    for axis, size in ((3, p.head_dim), (5, p.value_dim)):
        for kept in _subsets(size):
            yield _keeping(p, axis, kept)
    if p.head_dim == p.value_dim:
        for kept in _subsets(p.head_dim):
            yield lambda kept=kept: _keeping(_keeping(p, 3, kept)(), 5, kept)()  # type: ignore[misc]


def _subsets(size: int) -> Iterator[list[int]]:
    """All indices but a chunk: halves first, single ones last."""
    chunk = size // 2
    while chunk >= 1:
        for start in reversed(range(0, size - chunk + 1, chunk)):
            yield [*range(start), *range(start + chunk, size)]
        chunk //= 2


def _keeping(p: Problem, axis: int, kept: list[int]) -> Callable[[], Problem]:
    """Keeps some indices of one size (6: heads within every group)."""

    def cut() -> Problem:
        heads = torch.arange(p.num_heads).view(p.num_kv_heads, p.group)
        index = torch.tensor(kept)
        changes: dict[str, Any] = {}
        picked = heads[index].flatten() if axis == 1 else heads[:, index].flatten() if axis == 6 else index
        for name, axes in _AXES.items():
            x = getattr(p, name)
            if x is None:
                continue
            for place, which in enumerate(axes):
                if which == axis or (which == 1 and axis == 6):
                    x = x.index_select(place, picked)
                elif which is None and axis == 1:
                    x = x.index_select(place, index)
            changes[name] = x
        for name in ("mask", "bias"):
            x = getattr(p, name)
            dimension = {0: 0, 1: 1, 6: 1, 2: 2, 4: 3}.get(axis)
            if x is not None and dimension is not None and x.shape[dimension] > 1:
                changes[name] = x.index_select(dimension, picked)
        for name in ("sink", "alibi_slopes"):
            x = getattr(p, name)
            if x is not None and axis in (1, 6):
                changes[name] = x.index_select(x.ndim - 1, picked)
        if p.key_lengths is not None:
            lengths = p.key_lengths[index] if axis == 0 else p.key_lengths
            if axis == 4:
                lengths = (index.view(1, -1) < lengths.view(-1, 1)).sum(-1)
            changes["key_lengths"] = lengths
        return _or_same(p, changes)

    return cut


def _simpler(p: Problem) -> Candidates:
    for name in ("q", "k", "v", "dout", "bias", "sink", "alibi_slopes"):
        x = getattr(p, name)
        if x is None or not x.numel():
            continue
        for simpler in _simpler_values(x):
            yield _change(p, {name: simpler})


def _simpler_values(x: Tensor) -> Iterator[Tensor]:
    wide = x.double()
    whole = (
        torch.zeros_like(wide),
        torch.ones_like(wide),
        wide.round(),
        _few_bits(wide, 0),
        _few_bits(wide, 2),
    )
    for candidate in whole:
        if _simplicity(candidate) < _simplicity(wide):
            yield candidate.to(x.dtype)
    flat = wide.flatten()
    chunk = max(1, flat.numel() // 2)
    while chunk >= 1:
        for start in range(0, flat.numel(), chunk):
            part = flat[start : start + chunk]
            for value in (torch.zeros_like(part), torch.ones_like(part)):
                if _simplicity(value) < _simplicity(part):
                    changed = flat.clone()
                    changed[start : start + chunk] = value
                    yield changed.view(x.shape).to(x.dtype)
        chunk //= 2


def _few_bits(x: Tensor, bits: int) -> Tensor:
    fraction, exponent = torch.frexp(x)
    return torch.ldexp((fraction * 2.0 ** (bits + 1)).round() / 2.0 ** (bits + 1), exponent)


def _simplicity(x: Tensor) -> tuple[int, int]:
    """Non-zero values, then how many of them are not 1; small is simple."""
    return int((x != 0).sum()), len(set(x.flatten().tolist())) + int(((x != 0) & (x != 1)).sum())
