"""Checks a call's arguments and reduces them to the few numbers that the kernels take."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from kernels.interpreter import interpreted

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
CAUSAL = (None, "top_left", "bottom_right")
LOG2E = 1.4426950408889634
# Below fp32's smallest normal number a factor may be flushed to zero, and 0 * -inf is NaN.
_SMALLEST_FACTOR = 2.0**-126
UNSUPPORTED = (
    "window",
    "mask",
    "bias",
    "alibi_slopes",
    "softcap",
    "sink",
    "key_lengths",
    "cu_seqlens_q",
    "cu_seqlens_k",
)


@dataclass(frozen=True, slots=True)
class Options:
    """What the kernels need to know about scores and visibility.

    Attributes:
        scale: the factor of q . k, a finite number.
        sigma: factor from a kernel's scores to log2 units; never zero.
        score_factor: what q . k is multiplied by before sigma; 1 where ``plain_score``.
        plain_score: the score is q . k itself, and sigma carries the scale.
        shift: key aligned with query 0.
        left, right: keys seen before and after the diagonal; None is unlimited.
    """

    scale: float
    sigma: float
    score_factor: float
    plain_score: bool
    shift: int
    left: int | None
    right: int | None


def check_tensors(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """Raise ValueError, naming the argument, its value and what is legal, unless the three fit together."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.ndim != 4:
            raise ValueError(f"{name} has {x.ndim} dimensions; it must have 4: (batch, heads, length, dim)")
        if x.dtype not in DTYPES:
            raise ValueError(f"{name}.dtype is {x.dtype}; it must be one of {', '.join(map(str, DTYPES))}")
        if x.dtype != q.dtype or x.device != q.device:
            raise ValueError(f"{name} is {x.dtype} on {x.device}; it must be as q, {q.dtype} on {q.device}")
        if x.shape[0] != q.shape[0]:
            raise ValueError(f"{name}.shape[0] is {x.shape[0]}; it must equal q's batch, {q.shape[0]}")
        if not 1 <= x.shape[3] <= 256:
            raise ValueError(f"{name}.shape[3] is {x.shape[3]}; the dim must lie in 1..256")
    if k.shape[3] != q.shape[3]:
        raise ValueError(f"k.shape[3] is {k.shape[3]}; it must equal q's head dim, {q.shape[3]}")
    if v.shape[1:3] != k.shape[1:3]:
        raise ValueError(
            f"v has (heads, length) {tuple(v.shape[1:3])}; they must equal k's, {tuple(k.shape[1:3])}"
        )
    heads, kv_heads = q.shape[1], k.shape[1]
    if kv_heads == 0 or heads % kv_heads:
        raise ValueError(f"q has {heads} heads and k {kv_heads}; q's must be a multiple of k's, at least 1")
    if q.device.type != "cuda" and not interpreted():
        raise ValueError(
            f"q.device is {q.device}; it must be cuda, or any device with TRITON_INTERPRET=1 set"
        )


def parse_options(
    q: torch.Tensor,
    k: torch.Tensor,
    *,
    scale: float | None = None,
    causal: str | None = None,
    **unsupported: Any,
) -> Options:
    """Options of a call on checked tensors.

    Raises:
        NotImplementedError: an option that is known and not supported yet.
        TypeError: an option that is not known.
        ValueError: an illegal value.
    """
    for name, value in unsupported.items():
        if name not in UNSUPPORTED:
            raise TypeError(f"unknown option {name!r}")
        if value is not None:
            raise NotImplementedError(f"option {name!r} is not supported yet")
    if causal not in CAUSAL:
        raise ValueError(f"causal is {causal!r}; it must be None, 'top_left' or 'bottom_right'")
    scale = 1 / math.sqrt(q.shape[3]) if scale is None else float(scale)
    if not math.isfinite(scale):
        raise ValueError(f"scale is {scale}; it must be a finite number")
    plain = abs(scale * LOG2E) >= _SMALLEST_FACTOR
    return Options(
        scale=scale,
        sigma=scale * LOG2E if plain else 1.0,
        score_factor=1.0 if plain else scale * LOG2E,
        plain_score=plain,
        shift=k.shape[2] - q.shape[2] if causal == "bottom_right" else 0,
        left=None,
        right=0 if causal is not None else None,
    )
