"""Named value families: what fills q, k and v. One function a family, registered with its purpose.

A family is deterministic in (sizes, format, scale, seed) and needs torch alone. It returns float64
tensors; ``values`` rounds them into the format, so every family is exact data for every format.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from flashcheck.errors import UnknownNameError
from flashcheck.formats import FP32, round_nearest
from flashcheck.inputs.sizes import Draw, Sizes

Property = Literal["ordinary", "exact", "overflows"]
Values = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True, slots=True)
class Family:
    """A value family.

    Attributes:
        name: as specs and reports spell it.
        purpose: which faults it is for.
        make: fills q, k and v in float64.
        properties: ``ordinary``: data like a trained network's, on which the rms prediction is sharp;
            ``exact``: small integers, products are exact in every format; ``overflows``: scores leave
            the range of fp32, so only contract point 7 is judged.
    """

    name: str
    purpose: str
    make: Callable[[Draw], Values]
    properties: frozenset[Property]


FAMILIES: dict[str, Family] = {}


def family(
    name: str, purpose: str, *properties: Property
) -> Callable[[Callable[[Draw], Values]], Callable[[Draw], Values]]:
    """Registers the decorated function as a value family."""

    def register(make: Callable[[Draw], Values]) -> Callable[[Draw], Values]:
        FAMILIES[name] = Family(name, purpose, make, frozenset(properties))
        return make

    return register


def family_named(name: str) -> Family:
    """The family called ``name``; raises UnknownNameError for any other name."""
    try:
        return FAMILIES[name]
    except KeyError:
        raise UnknownNameError("family", name, FAMILIES) from None


def values(name: str, sizes: Sizes, seed: int) -> Values:
    """q, k, v of a family, float64 values of the format, always finite.

    ``mixed`` gives every (batch, key/value head) pair a family of its own.
    """
    make = family_named(name).make
    drawn = make(Draw(sizes, _generator(name, seed)))
    limit = sizes.format.max_finite
    q, k, v = (round_nearest(x.clamp(-limit, limit), sizes.format) for x in drawn)
    return q, k, v


def _generator(name: str, seed: int) -> torch.Generator:
    # The name enters the seed, so that two families with one seed do not share their noise.
    digest = hashlib.sha256(f"{name}/{seed}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))


@family("normal", "N(0, 1): the usual test", "ordinary")
def _normal(draw: Draw) -> Values:
    return draw.normals()


@family("normal_small", "N(0, 1) at 1e-4..1e-1: underflow of products and of P V", "ordinary")
def _normal_small(draw: Draw) -> Values:
    scale = draw.one_of((1e-4, 1e-3, 1e-2, 1e-1))
    q, k, v = draw.normals()
    return q * scale, k * scale, v * scale


@family("normal_large", "N(0, 1) with V at 10..1e4 and logits at 2..4 sigma: magnitude errors")
def _normal_large(draw: Draw) -> Values:
    q, k, v = draw.normals()
    return q * draw.one_of((1.4, 2.0)), k * draw.one_of((1.4, 2.0)), v * draw.one_of((10.0, 1e2, 1e3, 1e4))


@family("uniform", "uniform on [-1, 1): flat attention", "ordinary")
def _uniform(draw: Draw) -> Values:
    s = draw.sizes
    return draw.uniform(s.q_shape), draw.uniform(s.k_shape), draw.uniform(s.v_shape)


@family("outliers", "N(0, 1) + N(0, 100) in one place of a thousand: what trained networks feed", "ordinary")
def _outliers(draw: Draw) -> Values:
    s = draw.sizes

    def mix(shape: tuple[int, ...]) -> Tensor:
        return draw.normal(shape) + 10.0 * draw.normal(shape) * draw.happens(shape, 0.001)

    return mix(s.q_shape), mix(s.k_shape), mix(s.v_shape)


@family("huge_logits", "q and k at 30 sigma: one-hot rows, exponents in the hundreds")
def _huge_logits(draw: Draw) -> Values:
    q, k, v = draw.normals()
    return 30.0 * q, 30.0 * k, v


@family("extreme_logits", "logits up to 1e30 (or the format's end): range of the running maximum")
def _extreme_logits(draw: Draw) -> Values:
    q, k, v = draw.normals()
    s = draw.sizes
    top = 2.0 ** draw.one_of((20.0, 35.0, 60.0, 100.0))
    size = min(math.sqrt(top), s.format.max_finite / 8)
    return q * size, k * size, v


@family(
    "overflowing_logits",
    "scores past the end of fp32: inf, NaN or right, never finite and wrong",
    "overflows",
)
def _overflowing_logits(draw: Draw) -> Values:
    # One sign per key: partial sums then overflow to the side that the score lies on. With mixed signs a
    # sum can pass -inf on its way to a positive score, and no fp32 accumulator would notice.
    q, k, v = draw.normals()
    size = min(2.0**68, draw.sizes.format.max_finite / 8)
    side = torch.where(draw.happens((*draw.sizes.k_shape[:3], 1), 0.5), size, -size)
    return q.abs() * size, k.abs() * side, v


def _added_to_logits(draw: Draw, q: Tensor, k: Tensor, wanted: Tensor) -> Values:
    """q, k with ``wanted`` (num_keys) added to every row's logits through the first component."""
    s = draw.sizes
    reach = float(wanted.abs().max()) / max(abs(s.scale), 1e-3) if wanted.numel() else 0.0
    size = max(math.sqrt(reach), 1.0)
    q, k = q.clone(), k.clone()
    sign = -1.0 if s.scale < 0 else 1.0
    q[..., 0] = size
    k[..., 0] = sign * wanted / (size * max(abs(s.scale), 1e-3))
    return q, k, draw.normal(s.v_shape)


@family("shifted", "all logits of a row near +-1e2..3e5: absolute errors, finite start of the maximum")
def _shifted(draw: Draw) -> Values:
    q, k, _ = draw.normals()
    shift = draw.sign() * draw.one_of((1e2, 1e3, 1e4, 1e5, 3e5))
    wanted = torch.full((draw.sizes.num_keys,), shift, dtype=torch.float64)
    return _added_to_logits(draw, q, k, wanted)


@family("very_negative", "all logits below -1e4: a running maximum that starts finite never rises")
def _very_negative(draw: Draw) -> Values:
    q, k, _ = draw.normals()
    shift = -draw.one_of((2e4, 1e5, 3e5))
    wanted = torch.full((draw.sizes.num_keys,), shift, dtype=torch.float64)
    return _added_to_logits(draw, q, k, wanted)


@family("increasing", "logits rise along the keys: every tile rescales all before it")
def _increasing(draw: Draw) -> Values:
    q, k, _ = draw.normals()
    top = draw.one_of((5.0, 20.0, 60.0))
    return _added_to_logits(draw, 0.3 * q, 0.3 * k, torch.linspace(-top, top, draw.sizes.num_keys).double())


@family("decreasing", "logits fall along the keys: late tiles vanish, the first one must stay")
def _decreasing(draw: Draw) -> Values:
    q, k, _ = draw.normals()
    top = draw.one_of((5.0, 20.0, 60.0))
    return _added_to_logits(draw, 0.3 * q, 0.3 * k, torch.linspace(top, -top, draw.sizes.num_keys).double())


@family("spiked", "one key far above the rest, at a tile edge or the end: tails and lost tiles")
def _spiked(draw: Draw) -> Values:
    q, k, _ = draw.normals()
    n = draw.sizes.num_keys
    wanted = torch.zeros(n, dtype=torch.float64)
    if n:
        edges = (0.0, n - 1.0, n // 2, min(16, n - 1), min(63, n - 1), min(64, n - 1))
        wanted[int(draw.one_of(edges))] = draw.one_of((8.0, 15.0, 40.0))
    return _added_to_logits(draw, 0.5 * q, 0.5 * k, wanted)


@family("ties", "duplicated keys: equal logits in different tiles")
def _ties(draw: Draw) -> Values:
    q, k, v = draw.normals()
    return 2.0 * q, 2.0 * _duplicated(k), v


@family("near_ties", "keys that differ in the last bit: nearly equal logits")
def _near_ties(draw: Draw) -> Values:
    q, k, v = draw.normals()
    nudge = 1.0 + 2.0 * draw.sizes.format.unit_roundoff * draw.happens(draw.sizes.k_shape, 0.1)
    return 3.0 * q, 3.0 * _duplicated(k) * nudge, v


def _duplicated(k: Tensor) -> Tensor:
    distinct = max(k.shape[2] // 4, 1)
    return k[:, :, torch.arange(k.shape[2]) % distinct]


@family("one_hot", "every row attends to one key: O must be that value to the last bit")
def _one_hot(draw: Draw) -> Values:
    s = draw.sizes
    k = torch.where(draw.happens(s.k_shape, 0.5), 8.0, -8.0).double()
    chosen = torch.arange(s.num_queries) % max(s.num_keys, 1)
    if s.num_keys == 0:
        return draw.normal(s.q_shape), k, draw.normal(s.v_shape)
    q = k.repeat_interleave(s.num_heads // s.num_kv_heads, 1)[:, :, chosen]
    return (-q if s.scale < 0 else q), k, draw.normal(s.v_shape)


@family("cancelling_v", "V of alternating sign: the sum is far smaller than its terms", "ordinary")
def _cancelling_v(draw: Draw) -> Values:
    q, k, v = draw.normals()
    sign = 1.0 - 2.0 * (torch.arange(draw.sizes.num_keys) % 2).double().unsqueeze(-1)
    return q, k, sign * (4.0 + 0.1 * v)


@family("constant_v", "V constant along the keys: O is that constant, whatever P is")
def _constant_v(draw: Draw) -> Values:
    q, k, v = draw.normals()
    return q, k, v[:, :, :1].expand(draw.sizes.v_shape).clone()


@family("offset_v", "V = 100 + N(0, 1): errors of the row sum", "ordinary")
def _offset_v(draw: Draw) -> Values:
    q, k, v = draw.normals()
    return q, k, 100.0 + v


@family("integers", "integers -2..2: every product exact in every format", "exact")
def _integers(draw: Draw) -> Values:
    s = draw.sizes
    return draw.integers(s.q_shape, -2, 2), draw.integers(s.k_shape, -2, 2), draw.integers(s.v_shape, -2, 2)


@family("low_rank", "q and k of rank one: logits with structure", "ordinary")
def _low_rank(draw: Draw) -> Values:
    s = draw.sizes
    direction = draw.normal((s.head_dim,)) / math.sqrt(s.head_dim)
    q = draw.normal((*s.q_shape[:3], 1)) * direction * 2.0
    k = draw.normal((*s.k_shape[:3], 1)) * direction * 2.0
    return q, k, draw.normal(s.v_shape)


@family("subnormals", "q, k or v among the subnormal numbers: flushing to zero")
def _subnormals(draw: Draw) -> Values:
    q, k, v = draw.normals()
    tiny = 8.0 * draw.sizes.format.quantum
    where = draw.one_of((0.0, 1.0, 2.0))
    if where == 0.0:
        return q * tiny, k, v
    return (q, k * tiny, v) if where == 1.0 else (q, k, v * tiny)


@family("format_maxima", "V at the largest finite values: overflow of P V and of the output")
def _format_maxima(draw: Draw) -> Values:
    q, k, v = draw.normals()
    # Past fp32's own range the accumulator, not the output, would overflow: leave one binade.
    top = min(draw.sizes.format.max_finite, FP32.max_finite / 2)
    keep = draw.happens(draw.sizes.v_shape, 0.5)
    return q, k, torch.where(keep, torch.sign(v) * top, v)


@family("signed_zeros", "zeros of both signs in q, k and v: 0/0 and -0.0", "exact")
def _signed_zeros(draw: Draw) -> Values:
    q, k, v = draw.normals()

    def thin(x: Tensor) -> Tensor:
        return torch.where(draw.happens(tuple(x.shape), 0.5), torch.copysign(torch.zeros_like(x), x), x)

    return thin(q), thin(k), thin(v)


@family("mixed_rows", "another scale in every row of q, k and v: no fast path fits all rows of a tile")
def _mixed_rows(draw: Draw) -> Values:
    q, k, v = draw.normals()

    def scaled(x: Tensor, low: int, high: int) -> Tensor:
        return x * 2.0 ** draw.integers((*x.shape[:3], 1), low, high)

    return scaled(q, -6, 3), scaled(k, -6, 2), scaled(v, -6, 6)


@family("offset_keys", "K = 8 + N(0, 1): all scores of a row share a large part", "ordinary")
def _offset_keys(draw: Draw) -> Values:
    q, k, v = draw.normals()
    return q, k + 8.0, v


@family("mixed", "another family in every head: no fast path fits all")
def _mixed(draw: Draw) -> Values:
    s = draw.sizes
    group = s.num_heads // s.num_kv_heads
    part = Sizes(1, group, 1, s.num_queries, s.num_keys, s.head_dim, s.value_dim, s.scale, s.format)
    names = [n for n, f in FAMILIES.items() if n != "mixed" and "overflows" not in f.properties]
    q, k, v = (torch.zeros(shape, dtype=torch.float64) for shape in (s.q_shape, s.k_shape, s.v_shape))
    for b in range(s.batch):
        for h in range(s.num_kv_heads):
            name = names[int(torch.randint(len(names), (), generator=draw.generator))]
            heads = slice(h * group, (h + 1) * group)
            q[b, heads], k[b, h : h + 1], v[b, h : h + 1] = (
                x[0] for x in FAMILIES[name].make(Draw(part, draw.generator))
            )
    return q, k, v
