"""What a kernel is compiled for, and how a shard keeps to a few such signatures.

On a GPU a new combination of dtype, head dims and options costs seconds of compilation, a case milliseconds.
A focus is one problem whose compiled part is kept: what else a problem has (lengths of one kind, batch,
values, how large a scale or a window is) is drawn anew for every case. A shard inside it meets one signature,
or a few where a window is as wide as some sequences; they can be compiled ahead.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace

from flashcheck.inputs.combinations import Covering, is_legal
from flashcheck.inputs.problems import Wishes, draw_spec
from flashcheck.inputs.spec import ProblemSpec
from flashcheck.kernel import Capabilities

SLOW = 0.3
"""Seconds of a call on a GPU in which something was compiled: at these lengths kernels take milliseconds."""

OPTIONS = ("causal", "window", "mask", "bias", "alibi", "softcap", "sink", "key_lengths", "segments")
"""Fields of a spec that are options which kernels are compiled with and without."""

_UNIT = 16
"""Numbers that this divides are compiled apart from others, by Triton and by what copies 16 bytes at once."""

_DECLARED_AS = {"alibi": "alibi_slopes", "segments": "cu_seqlens"}
_ATTEMPTS = 50


@dataclass(frozen=True, slots=True)
class Focus:
    """Part of a declaration: one dtype; and, where ``like`` is given, problems that are compiled like it."""

    dtype: str
    like: ProblemSpec | None = None

    def narrowed(self, capabilities: Capabilities) -> Capabilities:
        """The declaration of a kernel that could do no more than this."""
        if self.like is None:
            return capabilities
        wanted = {_DECLARED_AS.get(name, name) for name in _options(self.like)} | {"scale"}
        dims = sorted((self.like.head_dim, self.like.value_dim))
        options = tuple(o for o in capabilities.options if o in wanted)
        return replace(capabilities, head_dim=(dims[0], dims[1]), options=options)

    def kept(self, spec: ProblemSpec) -> ProblemSpec:
        """``spec`` with everything that a kernel is compiled for taken from ``like``; legal or not."""
        if (like := self.like) is None:
            return spec
        nq, nk = _as(spec.num_queries, like.num_queries), _as(spec.num_keys, like.num_keys)
        spec = replace(spec, num_queries=nq, num_keys=nk)
        alike_window = spec.window is not None and _sides(spec) == _sides(like)
        batch = 1 if like.segments is not None else spec.batch
        lengths = spec.key_lengths
        if lengths is None or len(lengths) != batch:
            lengths = tuple(-(-nk // (b + 1)) for b in range(batch))
        lengths = tuple(min(n, nk) for n in lengths)
        return replace(
            spec,
            batch=batch,
            num_heads=like.num_heads,
            num_kv_heads=like.num_kv_heads,
            head_dim=like.head_dim,
            value_dim=like.value_dim,
            scale=spec.scale if _sign(spec) == _sign(like) else like.scale,
            causal=like.causal,
            window=spec.window if alike_window else like.window,
            mask=spec.mask if spec.mask and _shape(spec.mask) == _shape(like.mask) else like.mask,
            bias=like.bias,
            alibi=like.alibi,
            softcap=None if like.softcap is None else spec.softcap or like.softcap,
            sink=(spec.sink or like.sink) if like.sink else False,
            key_lengths=None if like.key_lengths is None else lengths,
            segments=None
            if like.segments is None
            else ((nq // 3, nk // 2), (0, 0), (nq - nq // 3, nk - nk // 2)),
        )


def _options(spec: ProblemSpec) -> list[str]:
    return [name for name in OPTIONS if getattr(spec, name) not in (None, False)]


def _shape(mask: str | None) -> str | None:
    """Masks of one shape are compiled once, whatever they hide."""
    return mask if mask in (None, "per_head", "keys") else "pairs"


def _sides(spec: ProblemSpec) -> str:
    """Of a window. One that hides nothing on a side is none there, to a kernel that looks."""
    if spec.window is None:
        return ""
    longest = max(spec.num_queries, spec.num_keys)
    return "/".join("any" if side is None or side >= longest else "some" for side in spec.window)


def _sign(spec: ProblemSpec) -> str:
    scale = 1.0 if spec.scale is None else spec.scale
    return "-" if scale < 0 else "0" if scale == 0 else "+"


def _length(n: int) -> str:
    """Lengths are factors of strides: what divides them is compiled for, up to 16, and a stride of 1."""
    return "one" if n == 1 else f"{math.gcd(n, _UNIT)}k"


def _as(n: int, like: int) -> int:
    """The next length from ``n`` on that has the same divisors up to 16 as ``like``, and is 1 where it is."""
    if like <= 1:
        return like
    unit = math.gcd(like, _UNIT)
    times = -(-n // unit)
    if unit < _UNIT:
        times |= 1  # or a larger unit would divide it
    return max(3, times) if unit == 1 else unit * times


def derived(spec: ProblemSpec, backward: bool) -> str:
    """The signature assumed where none is declared: what compilers of attention kernels are known to
    specialise on, and no more (values and other lengths are run-time arguments)."""
    kinds = [f"{n}={getattr(spec, n)}" for n in ("causal", "bias", "alibi") if n in _options(spec)]
    kinds += [f"mask={_shape(spec.mask)}"] if spec.mask else []
    others = [n for n in _options(spec) if n in ("softcap", "sink", "key_lengths", "segments")]
    window = [f"window={_sides(spec)}"] if spec.window is not None else []
    heads = f"heads {min(spec.num_heads, 2)} group {min(spec.num_heads // spec.num_kv_heads, 2)}"
    keys_are_strides = spec.mask or spec.bias or spec.head_dim % _UNIT or spec.value_dim % _UNIT
    lengths = _length(spec.num_queries) + (f"x{_length(spec.num_keys)}" if keys_are_strides else "")
    passes = "forward+backward" if backward else "forward"
    words = (f"{spec.dtype} {spec.head_dim}/{spec.value_dim}", heads, *kinds, *window, *others)
    return " ".join((*words, f"scale{_sign(spec)}", lengths, passes))


class Foci:
    """New foci, one after the other: each dtype in turn; every other one for as many pairs of options that
    none had yet as it can hold, those between with few options or none, which take kernels' fast paths."""

    def __init__(self, rng: random.Random, capabilities: Capabilities, dtypes: tuple[str, ...]) -> None:
        self._rng, self._capabilities, self._dtypes = rng, capabilities, dtypes
        self._covering = Covering.of(capabilities, 2)
        self._made = 0

    def next(self) -> Focus:
        dtype = self._dtypes[self._made % len(self._dtypes)]
        dense = (self._made // len(self._dtypes)) % 2 == 1
        self._made += 1
        spec = self._covering.next_spec(self._rng, dtype, "normal") if dense else None
        return Focus(dtype, spec or self._sparse(dtype))

    def _sparse(self, dtype: str) -> ProblemSpec | None:
        wishes = Wishes(family="normal", plain=self._rng.random() < 0.5)
        for _ in range(_ATTEMPTS):
            spec = draw_spec(self._rng, self._capabilities, dtype, 0, wishes)
            if is_legal(spec, self._capabilities) and len(_options(spec)) <= FEW_OPTIONS:
                self._covering.cover(spec)
                return spec
        return None


FEW_OPTIONS = 2


def samples(
    focus: Focus, capabilities: Capabilities, backward: bool, seed: int, most: int = 40
) -> list[ProblemSpec]:
    """One problem for each signature that random draws inside the focus meet: what to compile ahead.

    Those met most often come first.
    """
    rng = random.Random(seed)
    narrow = focus.narrowed(capabilities)
    found: dict[str, list[ProblemSpec]] = {}
    for attempt in range(4 * most):
        spec = focus.kept(draw_spec(rng, narrow, focus.dtype, attempt, Wishes(family="normal")))
        if is_legal(spec, capabilities):
            found.setdefault(derived(spec, backward), []).append(spec)
    met = sorted(found.values(), key=len, reverse=True)
    return [specs[0] for specs in met[:most]]
