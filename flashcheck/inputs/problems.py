"""Draws problem specs from what a kernel declares: seedable, without Hypothesis.

Sizes crowd around tile edges, because that is where kernels change path; heads stay few, because a
fault that needs many heads needs them in a ratio (group against key/value heads), not in number.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any, Literal

from flashcheck.inputs.gradients import GRADIENT_KINDS
from flashcheck.inputs.spec import ALIBI_KINDS, BIAS_KINDS, SINK_KINDS, ProblemSpec
from flashcheck.inputs.values import FAMILIES
from flashcheck.kernel import Capabilities
from flashcheck.masks import Alignment

LENGTHS = (1, 2, 15, 16, 17, 31, 32, 33, 47, 63, 64, 65, 80, 100, 127, 128, 129)
"""One key, and both sides of every tile edge up to 128, with ragged lengths between."""

SHORT_LENGTHS = tuple(n for n in LENGTHS if n <= 33)

HEAD_DIMS = (1, 2, 3, 8, 16, 17, 24, 32, 40, 48, 64, 65, 72, 80, 96, 128, 160, 192, 256)
USUAL_HEAD_DIMS = (16, 32, 64, 128)
SCALES = (None, None, None, None, None, 1.0, 0.25, 0.0, -0.125, 0.001)
HEADS = ((1, 1), (2, 2), (3, 3))
GROUPED_HEADS = ((2, 1), (6, 3), (4, 2), (6, 2), (8, 2))
"""(query heads, key/value heads); group differs from the number of key/value heads in most."""

WINDOWS: tuple[tuple[int | None, int | None], ...] = (
    (0, 0),
    (3, 0),
    (17, 5),
    (None, 2),
    (31, None),
    (15, 0),
    (16, 0),
    (63, 1),
    (64, 0),
    (0, None),
    (100_000, 0),
)
"""Both sides of tile edges, nothing but the diagonal, no limit, and more than there is."""

GRADIENTS = (*["normal"] * len(GRADIENT_KINDS), *GRADIENT_KINDS)

MAX_ROWS = 520
"""batch * heads * Nq stays below this: one problem then takes a fraction of a second in the interpreter."""


Without = Literal["queries", "keys"]


@dataclass(frozen=True, slots=True)
class Wishes:
    """What a drawn spec must have; None: free. ``plain``: no option but a scale. ``without``: what the first
    sequence of a packed batch lacks, or of a batch with key lengths (keys)."""

    causal: str | None = None
    option: str | None = None
    family: str | None = None
    grouped: bool | None = None
    head_dim: int | None = None
    value_dim: Literal["same", "smaller", "larger"] | None = None
    lengths: tuple[int, int] | None = None
    window: tuple[int | None, int | None] | None = None
    scale: float | None = None
    without: Without | None = None
    empty_rows: bool = False
    plain: bool = False


def families_for(capabilities: Capabilities) -> tuple[str, ...]:
    """Families a kernel is judged on: those that overflow fp32 only where it declares non-finite values."""
    return tuple(
        name
        for name, family in FAMILIES.items()
        if capabilities.isolates_nonfinite or "overflows" not in family.properties
    )


def head_dims(capabilities: Capabilities) -> tuple[int, ...]:
    """The head dims worth trying out of the declared range, both ends included."""
    low, high = capabilities.head_dim
    step = capabilities.head_dim_multiple
    first, last = -(-low // step) * step, high // step * step
    inside = {d for d in HEAD_DIMS if low <= d <= high and d % step == 0} | {first, last}
    return tuple(sorted(inside))


def _value_dims(dims: tuple[int, ...], dim: int, relation: str | None) -> list[int]:
    """The dims of V that differ from ``dim``, to the side that is asked for."""
    smaller = [] if relation == "larger" else [d for d in dims if d < dim]
    return smaller + ([] if relation == "smaller" else [d for d in dims if d > dim])


def draw_spec(
    rng: random.Random, capabilities: Capabilities, dtype: str, seed: int, wishes: Wishes | None = None
) -> ProblemSpec:
    """One spec that the declaration covers and that has what ``wishes`` asks for."""
    wishes = wishes or Wishes()
    options = set(capabilities.options)
    causal = _causal(rng, capabilities, wishes)
    nq, nk = _lengths(rng, capabilities, causal, wishes)
    dims = head_dims(capabilities)
    relation = wishes.value_dim
    room = dims[1:] if relation == "smaller" else dims[:-1] if relation == "larger" else dims
    usual = tuple(d for d in room if d in USUAL_HEAD_DIMS) or room
    dim = wishes.head_dim or rng.choice(usual if rng.random() < 0.6 else room)
    differs = capabilities.value_dim_differs and (
        rng.random() < 0.2 if relation is None else relation != "same"
    )
    value_dim = rng.choice(_value_dims(dims, dim, relation) or [dim]) if differs else dim
    grouped = (
        capabilities.gqa and rng.random() < 0.4 if wishes.grouped is None else wishes.grouped
    ) and capabilities.gqa
    heads, kv_heads = rng.choice(GROUPED_HEADS if grouped else HEADS)
    batch = rng.choice((1, 1, 2))
    while batch * heads * nq > MAX_ROWS and (batch > 1 or (not grouped and heads > 1)):
        batch, heads, kv_heads = (1, heads, kv_heads) if batch > 1 else (1, 1, 1)
    scale = wishes.scale if wishes.scale is not None else rng.choice(SCALES)
    chosen = _options(rng, options, capabilities, wishes, batch, nq, nk)
    if wishes.option == "cu_seqlens":
        batch = 1
    return ProblemSpec(
        dtype=dtype,
        batch=batch,
        num_heads=heads,
        num_kv_heads=kv_heads,
        num_queries=nq,
        num_keys=nk,
        head_dim=dim,
        value_dim=value_dim,
        scale=scale if "scale" in options else None,
        causal=causal,
        family=wishes.family or rng.choice(families_for(capabilities)),
        gradient=rng.choice(GRADIENTS),
        seed=seed,
        **chosen,
    )


def _causal(rng: random.Random, capabilities: Capabilities, wishes: Wishes) -> Alignment | None:
    declared = [a for a in capabilities.causal if "causal" in capabilities.options]
    picked = wishes.causal or rng.choice(["none", *declared])
    if picked == "bottom_right" and picked in declared:
        return "bottom_right"
    return "top_left" if picked == "top_left" and picked in declared else None


def _lengths(
    rng: random.Random, capabilities: Capabilities, causal: Alignment | None, wishes: Wishes
) -> tuple[int, int]:
    if wishes.lengths is not None:
        return wishes.lengths
    drawn = (rng.choice(LENGTHS if rng.random() < 0.4 else SHORT_LENGTHS) for _ in range(2))
    nq, nk = map(capabilities.whole, drawn)
    if wishes.empty_rows:
        return capabilities.whole(max(nq, nk, 17)), capabilities.whole(min(nq, nk, 16))
    if not capabilities.cross_lengths or rng.random() < 0.25:
        return nq, nq
    if causal == "bottom_right" and nq > nk and not capabilities.empty_rows:
        return nk, nq  # the first Nq - Nk rows would see no key
    return nq, nk


def _options(
    rng: random.Random,
    options: set[str],
    capabilities: Capabilities,
    wishes: Wishes,
    batch: int,
    nq: int,
    nk: int,
) -> dict[str, Any]:
    """Optional features: the one wished for, and each other one now and then."""

    def wanted(name: str, chance: float) -> bool:
        return name in options and not wishes.plain and (wishes.option == name or rng.random() < chance)

    chosen: dict[str, Any] = {}
    masks = ["random", "first_key", "per_head", "keys"] + (["holes"] if capabilities.empty_rows else [])
    if wanted("mask", 0.25):
        chosen["mask"] = "holes" if wishes.empty_rows and "holes" in masks else rng.choice(masks)
    if wanted("window", 0.2):
        chosen["window"] = wishes.window or rng.choice(WINDOWS)
    if wanted("bias", 0.2):
        chosen["bias"] = rng.choice((True, *BIAS_KINDS))
    if wanted("alibi_slopes", 0.2):
        chosen["alibi"] = rng.choice((True, True, *ALIBI_KINDS))
    if wanted("softcap", 0.2):
        chosen["softcap"] = rng.choice((0.5, 1.0, 15.0, 50.0, 1e4))
    if wanted("sink", 0.2):
        chosen["sink"] = rng.choice((True, True, *SINK_KINDS))
    if wishes.option == "cu_seqlens":
        cut_q = 0 if wishes.without == "queries" else nq // 3
        cut_k = 0 if wishes.without == "keys" else nk // 2
        chosen["segments"] = ((cut_q, cut_k), (0, 0), (nq - cut_q, nk - cut_k))
    elif wanted("key_lengths", 0.2):
        low = 0 if capabilities.empty_rows else 1
        lengths = tuple(rng.randint(min(low, nk), nk) for _ in range(batch))
        chosen["key_lengths"] = (0, *lengths[1:]) if wishes.without == "keys" else lengths
    return chosen
