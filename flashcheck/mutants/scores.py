"""The faulty kernel's scores: scale, cap, bias, ALiBi, in fp32, and faults in each."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import pad

from flashcheck.formats import BF16, FP16, round_nearest
from flashcheck.mutants.switches import Switches, kept, reduced
from flashcheck.problem import Problem

LOG2E = math.log2(math.e)
DIM_TILE = 32
"""Head dims in the first tile of a product that is cut off there."""


def scale_of(problem: Problem, on: Switches, memory: dict[tuple[object, ...], float]) -> float:
    """The number that multiplies q . k."""
    scale = problem.effective_scale
    if problem.scale is not None and on("scale-ignored"):
        scale = 1.0 / math.sqrt(problem.head_dim)
    if on("scale-of-value-dim"):
        scale = scale * math.sqrt(problem.head_dim / problem.value_dim)
    if on("scale-wrong"):
        scale = scale * (1 + 2.0**-5)
    if on("scale-slightly-wrong"):
        scale = scale * (1 + 1e-4)
    if on("scale-short-log2e"):
        scale = scale * (1.442 / math.log2(math.e))
    bits = on.size("log2e")
    if bits is not None:
        scale = scale * (float(round_nearest(torch.tensor(LOG2E).double(), reduced(bits))) / LOG2E)
    if on("scale-absolute"):
        scale = abs(scale)
    if on("scale-cached"):
        scale = memory.setdefault((problem.q.shape, problem.k.shape, problem.q.dtype), scale)
    return float(torch.tensor(scale, dtype=torch.float64).float())


def score_tile(
    problem: Problem, q: Tensor, k: Tensor, keys: slice, scale: float, seen: Tensor, on: Switches
) -> Tensor:
    """Scores of a padded key tile, -inf where hidden: (B, H, Nq, tile), float32."""
    if q.shape[-1] > DIM_TILE and on("head-dim-truncated"):
        q, k = q[..., :DIM_TILE], k[..., :DIM_TILE]
    s = kept(q @ k.mT, on, "scores")
    if on("scores-fp16"):
        s = round_nearest(s.double(), FP16).float()
    bias = _padded(_keys(problem.bias, keys), seen)
    if bias is not None and on("bias-times-scale"):
        s = (s + bias) * scale
        bias = None
    else:
        s = s * scale
    s = _capped(problem, s, seen, on)
    if bias is not None:
        s = s + _faulty_bias(bias, on)
    alibi = _alibi(problem, keys, on)
    if alibi is not None:
        s = s + _padded_float(alibi, seen)
    if on("scores-clamped"):
        s = s.clamp(-1e4, 1e4)
    if problem.softcap is not None and on.active & {"cap-after-mask"}:
        return s
    if on("hidden-score-finite"):
        return torch.where(seen, s, -24.0)
    return torch.where(seen, s, -1e30 if on("empty-row-mean") else -torch.inf)


def _capped(p: Problem, s: Tensor, seen: Tensor, on: Switches) -> Tensor:
    if p.softcap is None:
        return s
    cap = p.softcap
    if on("cap-after-mask"):  # -inf becomes -cap, so hidden keys count
        return cap * torch.tanh(torch.where(seen, s, -torch.inf) / cap)
    if on("cap-formula"):
        return s * torch.tanh(s / cap)
    if on("cap-ignored"):
        return s
    return cap * torch.tanh(s / cap)


def _faulty_bias(bias: Tensor, on: Switches) -> Tensor:
    if on("bias-of-first-head"):
        return bias[:, :1]
    if bias.shape[2] > 1 and on("bias-of-first-row"):
        return bias[:, :, :1]
    if on("bias-clamped"):
        return bias.clamp(-8, 8)
    if on("bias-bf16"):
        return round_nearest(bias.double(), BF16).float()
    return bias


def _alibi(p: Problem, keys: slice, on: Switches) -> Tensor | None:
    if p.alibi_slopes is None:
        return None
    slopes = p.alibi_slopes.float().view(-1, p.num_heads, 1, 1)
    if on("alibi-next-head"):
        p = p.replaced(alibi_slopes=p.alibi_slopes.roll(1, -1))
    if on("alibi-top-left"):
        distance = torch.arange(p.num_queries).view(-1, 1) - torch.arange(p.num_keys)
        return _keys(-slopes * distance.abs(), keys)
    alibi = p.alibi()
    assert alibi is not None
    return _keys(-alibi if on("alibi-sign") else alibi, keys)


def _keys(x: Tensor | None, keys: slice) -> Tensor | None:
    return x if x is None or x.shape[-1] == 1 else x[..., keys]


def _padded(x: Tensor | None, seen: Tensor) -> Tensor | None:
    return None if x is None else _padded_float(x, seen)


def _padded_float(x: Tensor, seen: Tensor) -> Tensor:
    missing = 0 if x.shape[-1] == 1 else seen.shape[-1] - x.shape[-1]
    return pad(x.float(), (0, missing))
