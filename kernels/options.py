"""Checks a call's arguments and reduces them to what the kernels take."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import TensorWeakRef, WeakTensorKeyDictionary

from kernels.interpreter import interpreted
from kernels.launched import layout
from kernels.score_path import STORAGE, ScorePath

CAUSAL = (None, "top_left", "bottom_right")
_BIAS_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
LOG2E = 1.4426950408889634
# Below fp32's smallest normal number a factor may be flushed to zero, and 0 * -inf is NaN.
_SMALLEST_FACTOR = 2.0**-126


@dataclass(frozen=True, slots=True)
class Options:
    """What the kernels need to know about scores and visibility.

    Attributes:
        scale: the factor of q . k, a finite number.
        sigma, score_factor, cap, plain: see `kernels.scores`; sigma is never zero.
        bottom_right: the mask's diagonal ends in the last query and key, not starts in the first.
        left, right: keys seen before and after the diagonal; None is unlimited.
        mask, bias: (batch, heads, Nq, Nk), broadcast by strides of 0; or None.
        slopes: (batch, heads) fp32, times log2 e; sink: (heads,) fp32; key_lengths: (batch,).
        cu_q, cu_k: first rows of packed segments, and the end.
        segments: batches, or packed segments; longest_q, longest_k: of any of them.
        launches: what launches with these options remember (`kernels.launched`).
    """

    scale: float
    sigma: float
    score_factor: float
    cap: float
    plain: bool
    softcap: bool
    bottom_right: bool
    left: int | None
    right: int | None
    mask: Tensor | None
    bias: Tensor | None
    slopes: Tensor | None
    sink: Tensor | None
    key_lengths: Tensor | None
    cu_q: Tensor | None
    cu_k: Tensor | None
    segments: int
    longest_q: int
    longest_k: int
    launches: dict[Any, Any] = field(default_factory=dict, init=False, compare=False, repr=False)

    @property
    def plain_sigma(self) -> float | None:
        """As the function of that name returned it."""
        return self.sigma if self.plain else None

    @property
    def data_mask(self) -> bool:
        """Whether visibility depends on tensor contents, so that no tile may go unmasked."""
        return self.mask is not None or self.bias is not None


_checked: set[tuple[Any, ...]] = set()


def check_tensors(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raise ValueError, naming the argument, its value and what is legal, unless the three fit together."""
    key = (q.shape, k.shape, v.shape, q.dtype, k.dtype, v.dtype, q.device, k.device, v.device)
    if key in _checked:
        return
    _check_tensors(q, k, v)
    if len(_checked) >= _MOST_PARSED:
        _checked.clear()
    _checked.add(key)


def _check_tensors(q: Tensor, k: Tensor, v: Tensor) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.ndim != 4:
            raise ValueError(f"{name} has {x.ndim} dimensions; it must have 4: (batch, heads, length, dim)")
        if x.dtype not in STORAGE:
            raise ValueError(f"{name}.dtype is {x.dtype}; it must be one of {', '.join(map(str, STORAGE))}")
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


def check_gradients(
    dout: Tensor,
    q: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    dlse: Tensor | None,
    path: ScorePath,
) -> None:
    """Raise ValueError unless the backward's further tensors fit the forward's."""
    for name, x in (("dout", dout), ("out", out)):
        expected = (*q.shape[:3], v.shape[3])
        if tuple(x.shape) != expected or x.dtype != path.output or x.device != v.device:
            got = f"{x.dtype} {tuple(x.shape)} on {x.device}"
            raise ValueError(f"{name} is {got}; it must be {path.output} {expected} on {v.device}")
    for name, row in (("lse", lse), ("dlse", dlse)):
        if row is not None and (tuple(row.shape) != tuple(q.shape[:3]) or row.dtype != torch.float32):
            raise ValueError(
                f"{name} is {row.dtype} {tuple(row.shape)}; it must be torch.float32 {tuple(q.shape[:3])}"
            )


_parsed: dict[tuple[Any, ...], Options] = {}
_parsed_packed: Any = WeakTensorKeyDictionary()
"""By cu_seqlens_q: dicts of (cu_seqlens_k, options without the two, which would keep the key alive)."""
_MOST_PARSED, _MOST_PARSED_PACKED = 1024, 32
_ENDS = ("cu_seqlens_q", "cu_seqlens_k")
_OTHERS = frozenset({"mask", "bias", "alibi_slopes", "softcap", "sink", "key_lengths", *_ENDS})


def parse_options(
    q: Tensor,
    k: Tensor,
    *,
    scale: float | None = None,
    causal: str | None = None,
    window: tuple[int | None, int | None] | None = None,
    **others: Any,
) -> Options:
    """Options of a call on checked tensors; ValueError names an illegal argument and what is legal.

    Takes those of `kernels.interface.flash_attention`. The same object for calls that are alike and have no
    further options: these are parsed once. So are packed calls, a version of their tensors of ends.
    """
    plain = _OTHERS.issuperset(others) and all(x is None for name, x in others.items() if name not in _ENDS)
    # A scale of -0.0 is not one of 0.0, though they are equal.
    if not plain or scale == 0 or not isinstance(window, tuple | None):
        return _parse(q, k, scale=scale, causal=causal, window=window, **others)
    ends_q, ends_k = others.get("cu_seqlens_q"), others.get("cu_seqlens_k")
    if ends_q is not None or ends_k is not None:
        return _parse_packed(q, k, scale, causal, window, ends_q, ends_k)
    key = (q.shape, k.shape, scale, causal, window)
    found = _parsed.get(key)
    if found is None:
        found = _parse(q, k, scale=scale, causal=causal, window=window)
        if len(_parsed) >= _MOST_PARSED:
            _parsed.clear()
        _parsed[key] = found
    return found


def _parse_packed(
    q: Tensor,
    k: Tensor,
    scale: float | None,
    causal: str | None,
    window: tuple[int | None, int | None] | None,
    ends_q: Tensor | None,
    ends_k: Tensor | None,
) -> Options:
    def parsed() -> Options:
        return _parse(
            q, k, scale=scale, causal=causal, window=window, cu_seqlens_q=ends_q, cu_seqlens_k=ends_k
        )

    if ends_q is None or ends_k is None or not (_has_versions(ends_q) and _has_versions(ends_k)):
        return parsed()
    versions = ends_q._version, ends_k._version
    key = (q.shape, k.shape, q.device, scale, causal, window, layout(ends_q), layout(ends_k), *versions)
    known: dict[Any, tuple[Any, Options]] = _parsed_packed.setdefault(ends_q, {})
    before = known.get(key)
    if before is None or before[0]() is not ends_k:
        if len(known) >= _MOST_PARSED_PACKED:
            known.clear()
        before = known[key] = TensorWeakRef(ends_k), replace(parsed(), cu_q=None, cu_k=None)
    found = replace(before[1], cu_q=ends_q, cu_k=ends_k)
    object.__setattr__(found, "launches", before[1].launches)
    return found


def _has_versions(ends: Tensor) -> bool:
    """Whether torch tells that the tensor was written, and the kernels read it as it lies."""
    on_device = isinstance(ends, Tensor) and not _on_host(ends)
    return on_device and not ends.is_inference() and ends.is_contiguous()


def _parse(
    q: Tensor,
    k: Tensor,
    *,
    scale: float | None = None,
    causal: str | None = None,
    window: tuple[int | None, int | None] | None = None,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    softcap: float | None = None,
    sink: Tensor | None = None,
    key_lengths: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
) -> Options:
    batch, heads, num_queries, head_dim = q.shape
    num_keys = k.shape[2]
    if causal not in CAUSAL:
        raise ValueError(f"causal is {causal!r}; it must be None, 'top_left' or 'bottom_right'")
    scale = 1 / math.sqrt(head_dim) if scale is None else float(scale)
    if not math.isfinite(scale):
        raise ValueError(f"scale is {scale}; it must be a finite number")
    if softcap is not None and not (math.isfinite(softcap) and softcap > 0):
        raise ValueError(f"softcap is {softcap}; it must be a positive finite number, or None")
    left, right = _band(causal, window, num_queries + num_keys)
    full = (batch, heads, num_queries, num_keys)
    if mask is not None and mask.dtype != torch.bool:
        raise ValueError(f"mask.dtype is {mask.dtype}; it must be torch.bool, True where a key is seen")
    if bias is not None and bias.dtype not in _BIAS_DTYPES:
        raise ValueError(f"bias.dtype is {bias.dtype}; it must be one of {', '.join(map(str, _BIAS_DTYPES))}")
    if alibi_slopes is not None:
        if tuple(alibi_slopes.shape) not in ((heads,), (batch, heads)):
            shape = tuple(alibi_slopes.shape)
            raise ValueError(f"alibi_slopes.shape is {shape}; it must be ({heads},) or ({batch}, {heads})")
        alibi_slopes = (alibi_slopes.double() * LOG2E).float().expand(batch, heads)
    if sink is not None:
        if tuple(sink.shape) != (heads,):
            raise ValueError(f"sink.shape is {tuple(sink.shape)}; it must be ({heads},)")
        sink = sink.detach().float().contiguous()
    segments, longest_q, longest_k = batch, num_queries, num_keys
    if (cu_seqlens_q is None) != (cu_seqlens_k is None):
        raise ValueError("only one of cu_seqlens_q and cu_seqlens_k is given; they must come together")
    if cu_seqlens_q is not None and cu_seqlens_k is not None:
        if batch != 1:
            raise ValueError(f"q.shape[0] is {batch}; a batch packed by cu_seqlens_q must be 1")
        longest_q = _longest("cu_seqlens_q", cu_seqlens_q, num_queries)
        longest_k = _longest("cu_seqlens_k", cu_seqlens_k, num_keys)
        segments = len(cu_seqlens_q) - 1
        if len(cu_seqlens_k) != segments + 1:
            count = len(cu_seqlens_k)
            raise ValueError(f"cu_seqlens_k has {count} entries; cu_seqlens_q has {segments + 1}, as it must")
        cu_seqlens_q, cu_seqlens_k = cu_seqlens_q.contiguous(), cu_seqlens_k.contiguous()
    if key_lengths is not None:
        key_lengths = _checked_lengths(key_lengths, batch, num_keys)
    for name, x in (("mask", mask), ("bias", bias), ("alibi_slopes", alibi_slopes), ("sink", sink)):
        _check_device(name, x, q)
    for name, x in (
        ("key_lengths", key_lengths),
        ("cu_seqlens_q", cu_seqlens_q),
        ("cu_seqlens_k", cu_seqlens_k),
    ):
        _check_device(name, x, q)
    sigma = plain_sigma(head_dim, scale=scale, softcap=softcap, bias=bias, alibi_slopes=alibi_slopes)
    plain = sigma is not None
    return Options(
        scale=scale,
        sigma=1.0 if sigma is None else sigma,
        score_factor=1.0 if plain else (scale / softcap if softcap is not None else scale * LOG2E),
        cap=softcap * LOG2E if softcap is not None else 0.0,
        plain=plain,
        softcap=softcap is not None,
        # Where nothing is causal, windows count from the bottom-right diagonal.
        bottom_right=causal != "top_left",
        left=left,
        right=right,
        mask=_broadcast("mask", mask, full),
        bias=_broadcast("bias", bias, full),
        slopes=alibi_slopes,
        sink=sink,
        key_lengths=key_lengths,
        cu_q=cu_seqlens_q,
        cu_k=cu_seqlens_k,
        segments=segments,
        longest_q=longest_q,
        longest_k=longest_k,
    )


def plain_sigma(
    head_dim: int,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    bias: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    **_others: Any,
) -> float | None:
    """The factor of q . k to log2 units, of a call that does no more to its scores; None: it does.

    Takes the options of `kernels.interface.flash_attention`.
    """
    sigma = (1 / math.sqrt(head_dim) if scale is None else float(scale)) * LOG2E
    plain = softcap is None and bias is None and alibi_slopes is None and is_plain_factor(sigma)
    return sigma if plain else None


def is_plain_factor(factor: float) -> bool:
    """Whether a score may be multiplied by this inside the exponent: it is not flushed to zero."""
    return abs(factor) >= _SMALLEST_FACTOR


def _band(
    causal: str | None, window: tuple[int | None, int | None] | None, reach: int
) -> tuple[int | None, int | None]:
    """Keys seen before and after the diagonal; a side that no pair of ``reach`` rows can pass is None."""
    left, right = (None, None) if window is None else window
    for side, value in (("left", left), ("right", right)):
        if value is not None and value < 0:
            raise ValueError(f"window {side} is {value}; it must be an integer >= 0, or None for no limit")
    if causal is not None:
        right = 0
    # A window as wide as all rows together hides nothing; larger numbers would not fit the kernels' int32.
    left = None if left is None or left >= reach else int(left)
    right = None if right is None or right >= max(reach, 1) else int(right)
    return left, right


def _broadcast(name: str, x: Tensor | None, full: tuple[int, ...]) -> Tensor | None:
    if x is None:
        return None
    if x.ndim != 4 or any(n not in (1, m) for n, m in zip(x.shape, full, strict=True)):
        raise ValueError(
            f"{name}.shape is {tuple(x.shape)}; it must have 4 dimensions, each 1 or that of {full}"
        )
    return x.detach().expand(full)


_read: Any = WeakTensorKeyDictionary()
"""Values of cumulative lengths on a GPU, by tensor: (version, values). Reading them stalls the stream."""


def read_anew(options: Options) -> Options:
    """The options with the longest segments read again, for launches that would leave out what is longer.

    A tensor's version tells of torch's own writes, not of those by other kernels or a replayed graph.
    """
    if options.cu_q is None or options.cu_k is None or _on_host(options.cu_q):
        return options
    longest = (max(b - a for a, b in itertools.pairwise(x.tolist())) for x in (options.cu_q, options.cu_k))
    return replace(options, **dict(zip(("longest_q", "longest_k"), longest, strict=True)))


def _on_host(x: Tensor) -> bool:
    return x.device.type == "cpu"


def _values(x: Tensor) -> list[int]:
    if _on_host(x) or x.is_inference():
        return list(x.tolist())
    version, values = _read.get(x, (None, []))
    if version != x._version:
        values = x.tolist()
        _read[x] = (x._version, values)
    return list(values)


def _longest(name: str, cu_seqlens: Tensor, total: int) -> int:
    if cu_seqlens.dtype not in (torch.int32, torch.int64) or cu_seqlens.ndim != 1 or len(cu_seqlens) < 2:
        got = f"{cu_seqlens.dtype} {tuple(cu_seqlens.shape)}"
        raise ValueError(f"{name} is {got}; it must be int32 or int64 (segments + 1,)")
    ends = _values(cu_seqlens)
    lengths = [b - a for a, b in itertools.pairwise(ends)]
    if ends[0] != 0 or ends[-1] != total or min(lengths) < 0:
        raise ValueError(f"{name} is {ends}; it must be non-decreasing integers from 0 to {total}")
    return max(lengths)


def _checked_lengths(lengths: Tensor, batch: int, num_keys: int) -> Tensor:
    if lengths.dtype not in (torch.int32, torch.int64) or tuple(lengths.shape) != (batch,):
        raise ValueError(
            f"key_lengths is {lengths.dtype} {tuple(lengths.shape)}; it must be int32 or int64 ({batch},)"
        )
    # On a GPU the values are clamped by the kernel instead: reading them here would stall the stream.
    if lengths.device.type == "cpu" and bool(((lengths < 0) | (lengths > num_keys)).any()):
        raise ValueError(f"key_lengths is {lengths.tolist()}; they must be integers in 0..{num_keys}")
    return lengths.contiguous()


def _check_device(name: str, x: Tensor | None, q: Tensor) -> None:
    if x is not None and x.device != q.device:
        raise ValueError(f"{name} is on {x.device}; it must be on q's device, {q.device}")
