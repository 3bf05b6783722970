"""One attention call to be judged: tensors and options, validated. The contract in code.

    s_ij  = softcap(scale * q_i . k_j) + bias_ij - slope_h * |diagonal(i) - j|     masked: -inf
    p_ij  = exp(s_ij) / (sum_j exp(s_ij) + exp(sink_h))
    O_i   = sum_j p_ij v_j,    LSE_i = log(sum_j exp(s_ij) [+ exp(sink_h)])

with softcap(x) = c tanh(x / c). A row that sees no key has O = 0 and LSE = -inf (sink_h where there is
a sink) and adds nothing to any gradient. Shapes are (batch, heads, length, dim); query head h reads
key/value head h // (num_heads / num_kv_heads).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from flashcheck import masks
from flashcheck.errors import ArgumentError
from flashcheck.formats import Format, format_of

OPTIONS = (
    "scale",
    "causal",
    "window",
    "mask",
    "bias",
    "alibi_slopes",
    "softcap",
    "sink",
    "key_lengths",
    "cu_seqlens",
)
"""Options of the contract, by the names that kernels declare."""


@dataclass(frozen=True, eq=False)
class Problem:
    """One attention call.

    Attributes:
        q: (batch, heads, Nq, dim); k: (batch, kv_heads, Nk, dim); v: (batch, kv_heads, Nk, value_dim).
            One dtype for all three: fp64, fp32, fp16, bf16, e4m3 or e5m2.
        scale: multiplies q . k; any finite number; None: 1/sqrt(dim).
        causal: None, ``"top_left"`` or ``"bottom_right"``.
        window: (left, right) keys around the diagonal, both ends included; None on a side: no limit.
            The diagonal is that of ``causal``, bottom right where ``causal`` is None.
        mask: boolean, (batch or 1, heads or 1, Nq or 1, Nk or 1); True: visible.
        bias: floating, same shapes as ``mask``; added to the scaled, capped score.
        alibi_slopes: (heads,) or (batch, heads).
        softcap: positive, or None.
        sink: (heads,) logits that add to the denominator only.
        key_lengths: (batch,) integers in 0..Nk; keys past them are padding.
        cu_seqlens_q, cu_seqlens_k: (segments + 1,) integers, packed sequences; batch must be 1.
        q_descale, k_descale, v_descale: the stored values stand for value * descale.
        dout: (batch, heads, Nq, value_dim), for the backward; dlse: (batch, heads, Nq).
        family: the value family that made the tensors, and seed: with which seed; for reports.

    Raises:
        ArgumentError: naming the argument, its value and the legal values.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    scale: float | None = None
    causal: masks.Alignment | None = None
    window: tuple[int | None, int | None] | None = None
    mask: Tensor | None = None
    bias: Tensor | None = None
    alibi_slopes: Tensor | None = None
    softcap: float | None = None
    sink: Tensor | None = None
    key_lengths: Tensor | None = None
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_k: Tensor | None = None
    q_descale: float = 1.0
    k_descale: float = 1.0
    v_descale: float = 1.0
    dout: Tensor | None = None
    dlse: Tensor | None = None
    family: str = field(default="", compare=False)
    seed: int = field(default=0, compare=False)

    def __post_init__(self) -> None:
        _check_tensors(self)
        _check_numbers(self)
        _check_broadcast(self)
        _check_lengths(self)

    @property
    def batch(self) -> int:
        return self.q.shape[0]

    @property
    def num_heads(self) -> int:
        return self.q.shape[1]

    @property
    def num_kv_heads(self) -> int:
        return self.k.shape[1]

    @property
    def group(self) -> int:
        """Query heads per key/value head."""
        kv_heads = self.k.shape[1]
        return self.q.shape[1] // kv_heads if kv_heads else 1

    @property
    def num_queries(self) -> int:
        return self.q.shape[2]

    @property
    def num_keys(self) -> int:
        return self.k.shape[2]

    @property
    def head_dim(self) -> int:
        return self.q.shape[3]

    @property
    def value_dim(self) -> int:
        return self.v.shape[3]

    @property
    def format(self) -> Format:
        """Storage format of q, k and v."""
        return format_of(self.q.dtype)

    @property
    def effective_scale(self) -> float:
        """The number that multiplies q . k of the *stored* values: scale and descales together."""
        scale = 1.0 / math.sqrt(self.head_dim) if self.scale is None else float(self.scale)
        return scale * self.q_descale * self.k_descale

    @property
    def window_alignment(self) -> masks.Alignment:
        return self.causal or "bottom_right"

    def diagonal(self, alignment: masks.Alignment) -> masks.Diagonal:
        """The diagonal from which causality, windows and ALiBi count."""
        return masks.Diagonal(
            self.num_queries, self.num_keys, alignment, self.cu_seqlens_q, self.cu_seqlens_k
        )

    @cached_property
    def visibility(self) -> masks.Mask:
        """The one predicate that says which keys a query sees."""
        parts: list[masks.Mask] = []
        if self.cu_seqlens_q is not None and self.cu_seqlens_k is not None:
            parts.append(masks.Segments(self.cu_seqlens_q, self.cu_seqlens_k))
        if self.causal is not None:
            parts.append(masks.Causal(self.diagonal(self.causal)))
        if self.window is not None:
            parts.append(masks.Window(self.diagonal(self.window_alignment), *self.window))
        if self.key_lengths is not None:
            parts.append(masks.KeyPadding(self.key_lengths))
        if self.mask is not None:
            parts.append(masks.Dense(self.mask))
        combined: masks.Mask = masks.Everything()
        for part in parts:
            combined = part if isinstance(combined, masks.Everything) else combined & part
        return combined

    def visible(self, rows: Tensor | None = None) -> Tensor:
        """The dense mask, boolean (batch, heads, rows or Nq, Nk), derived from the predicate.

        Not to be changed in place: it is made once.
        """
        return self._visible if rows is None else self._visible_to(rows)

    @cached_property
    def _visible(self) -> Tensor:
        return self._visible_to(torch.arange(self.num_queries))

    def _visible_to(self, rows: Tensor) -> Tensor:
        return masks.dense(self.visibility, self.batch, self.num_heads, rows, self.num_keys)

    def alibi(self, rows: Tensor | None = None) -> Tensor | None:
        """The ALiBi term -slope_h * |diagonal(i) - j| in float64, (batch or 1, heads, rows, Nk)."""
        if self.alibi_slopes is None:
            return None
        rows = torch.arange(self.num_queries) if rows is None else rows
        slopes = self.alibi_slopes.double()
        slopes = slopes.view(1, -1, 1, 1) if slopes.ndim == 1 else slopes[:, :, None, None]
        aligned = self.diagonal("bottom_right").key_of(rows).view(1, 1, -1, 1)
        keys = torch.arange(self.num_keys).view(1, 1, 1, -1)
        return -slopes * (aligned - keys).abs().double()

    def options(self) -> tuple[str, ...]:
        """Names (of ``OPTIONS``) of the options this problem uses."""
        used = [name for name in OPTIONS if name != "cu_seqlens" and getattr(self, name) is not None]
        return (*used, "cu_seqlens") if self.cu_seqlens_q is not None else tuple(used)

    def describe(self) -> str:
        """One line for reports: shapes, dtype, options, values."""
        shape = (
            f"b={self.batch} h={self.num_heads}/{self.num_kv_heads} nq={self.num_queries} nk={self.num_keys}"
        )
        dims = f"d={self.head_dim}" + (f"/{self.value_dim}" if self.value_dim != self.head_dim else "")
        parts = [self.format.name, shape, dims]
        for name in self.options():
            value = getattr(self, name, None)
            parts.append(name if value is None or isinstance(value, Tensor) else f"{name}={value}")
        if self.family:
            parts.append(f"values={self.family}")
        return " ".join(parts) + f" seed={self.seed}"

    def replaced(self, **changes: object) -> Problem:
        """A copy with some fields changed, validated again."""
        return replace(self, **changes)  # type: ignore[arg-type]


def _check_tensors(p: Problem) -> None:
    for name in ("q", "k", "v"):
        x = getattr(p, name)
        if not isinstance(x, Tensor):
            raise ArgumentError(name, type(x).__name__, "a torch tensor")
        if x.ndim != 4:
            raise ArgumentError(name, f"shape {tuple(x.shape)}", "4 dimensions (batch, heads, length, dim)")
    for name in ("k", "v"):
        if getattr(p, name).dtype != p.q.dtype:
            raise ArgumentError(f"{name}.dtype", getattr(p, name).dtype, f"that of q, {p.q.dtype}")
        if getattr(p, name).shape[0] != p.batch:
            raise ArgumentError(f"{name}.shape[0]", getattr(p, name).shape[0], f"the batch of q, {p.batch}")
    format_of(p.q.dtype)
    if p.k.shape[:3] != p.v.shape[:3]:
        raise ArgumentError(
            "v.shape", tuple(p.v.shape), f"(batch, kv_heads, Nk) of k, {tuple(p.k.shape[:3])}"
        )
    if p.k.shape[3] != p.head_dim:
        raise ArgumentError("k.shape[3]", p.k.shape[3], f"the head dim of q, {p.head_dim}")
    for name, size in (("q.shape[3]", p.head_dim), ("v.shape[3]", p.value_dim)):
        if size < 1:
            raise ArgumentError(name, size, "a head dim of at least 1")
    if p.num_kv_heads < 1 or p.num_heads < 1 or p.num_heads % p.num_kv_heads:
        raise ArgumentError(
            "q.shape[1]", p.num_heads, f"a positive multiple of the {p.num_kv_heads} key/value heads"
        )
    out_shape = (p.batch, p.num_heads, p.num_queries, p.value_dim)
    if p.dout is not None and tuple(p.dout.shape) != out_shape:
        raise ArgumentError("dout.shape", tuple(p.dout.shape), f"the output's, {out_shape}")
    if p.dlse is not None and tuple(p.dlse.shape) != out_shape[:3]:
        raise ArgumentError("dlse.shape", tuple(p.dlse.shape), f"(batch, heads, Nq), {out_shape[:3]}")


def _check_numbers(p: Problem) -> None:
    if p.scale is not None and not math.isfinite(p.scale):
        raise ArgumentError("scale", p.scale, "a finite number, or None for 1/sqrt(dim)")
    if p.softcap is not None and not (math.isfinite(p.softcap) and p.softcap > 0):
        raise ArgumentError("softcap", p.softcap, "a positive finite number, or None")
    for name in ("q_descale", "k_descale", "v_descale"):
        value = getattr(p, name)
        if not (math.isfinite(value) and value > 0):
            raise ArgumentError(name, value, "a positive finite number")
    if p.causal is not None and p.causal not in masks.ALIGNMENTS:
        raise ArgumentError("causal", repr(p.causal), f"None or one of {', '.join(masks.ALIGNMENTS)}")
    if p.window is not None:
        if not (isinstance(p.window, tuple) and len(p.window) == 2):
            raise ArgumentError("window", p.window, "a pair (left, right)")
        for side, value in zip(("left", "right"), p.window, strict=True):
            if value is not None and value < 0:
                raise ArgumentError(f"window {side}", value, "an integer >= 0, or None for no limit")


def _check_broadcast(p: Problem) -> None:
    full = (p.batch, p.num_heads, p.num_queries, p.num_keys)
    for name in ("mask", "bias"):
        x = getattr(p, name)
        if x is None:
            continue
        if x.ndim != 4 or any(n not in (1, m) for n, m in zip(x.shape, full, strict=True)):
            raise ArgumentError(f"{name}.shape", tuple(x.shape), f"4 dimensions, each 1 or that of {full}")
    if p.mask is not None and p.mask.dtype != torch.bool:
        raise ArgumentError("mask.dtype", p.mask.dtype, "torch.bool (True: visible)")
    if p.bias is not None and not p.bias.dtype.is_floating_point:
        raise ArgumentError("bias.dtype", p.bias.dtype, "a floating dtype")
    heads = p.num_heads
    if p.sink is not None and tuple(p.sink.shape) != (heads,):
        raise ArgumentError("sink.shape", tuple(p.sink.shape), f"({heads},)")
    if p.alibi_slopes is not None and tuple(p.alibi_slopes.shape) not in ((heads,), (p.batch, heads)):
        raise ArgumentError(
            "alibi_slopes.shape", tuple(p.alibi_slopes.shape), f"({heads},) or ({p.batch}, {heads})"
        )


def _check_lengths(p: Problem) -> None:
    if p.key_lengths is not None:
        lengths = p.key_lengths
        if lengths.dtype not in (torch.int32, torch.int64) or tuple(lengths.shape) != (p.batch,):
            raise ArgumentError(
                "key_lengths", f"{lengths.dtype} {tuple(lengths.shape)}", f"int32/int64 ({p.batch},)"
            )
        if bool(((lengths < 0) | (lengths > p.num_keys)).any()):
            raise ArgumentError("key_lengths", lengths.tolist(), f"integers in 0..{p.num_keys}")
    if (p.cu_seqlens_q is None) != (p.cu_seqlens_k is None):
        raise ArgumentError("cu_seqlens_q, cu_seqlens_k", "only one given", "both or neither")
    if p.cu_seqlens_q is None or p.cu_seqlens_k is None:
        return
    if p.batch != 1:
        raise ArgumentError("cu_seqlens_q", f"batch {p.batch}", "a packed batch of 1")
    if len(p.cu_seqlens_q) != len(p.cu_seqlens_k):
        raise ArgumentError(
            "cu_seqlens_k", f"{len(p.cu_seqlens_k)} entries", f"{len(p.cu_seqlens_q)}, as cu_seqlens_q"
        )
    for name, total in (("cu_seqlens_q", p.num_queries), ("cu_seqlens_k", p.num_keys)):
        ends = getattr(p, name)
        good = ends.ndim == 1 and len(ends) >= 2 and int(ends[0]) == 0 and int(ends[-1]) == total
        if not good or bool((ends.diff() < 0).any()):
            raise ArgumentError(name, ends.tolist(), f"non-decreasing integers from 0 to {total}")
