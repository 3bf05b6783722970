"""A problem as plain data: what a certificate stores and rebuilds exactly."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from flashcheck.errors import UnknownNameError
from flashcheck.formats import format_named
from flashcheck.inputs.gradients import output_gradient
from flashcheck.inputs.sizes import Sizes
from flashcheck.inputs.values import values
from flashcheck.masks import Alignment
from flashcheck.problem import Problem

MASK_KINDS = ("random", "holes", "first_key", "per_head", "keys")
"""random: half of all pairs, every row sees a key; holes: random with rows that see none;
first_key: keys 0 and up to 2 others; per_head: another random mask in every head; keys: half of the keys,
the same for all rows (its query dimension is 1)."""

ALIBI_KINDS = ("batch",)
"""batch: slopes for every batch and head. ``True``: one set for all batches."""

SINK_KINDS = ("low", "high")
"""low: logits near -50, which vanish; high: near +30, above most scores. ``True``: N(0, 1)."""

BIAS_KINDS = ("bhqk", "hqk", "hk", "bq", "k")
"""Dimensions (batch, head, query, key) that a bias has; the others are 1. ``True`` means ``hqk``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProblemSpec:
    """Sizes, options, value family and seed of one problem; ``build`` makes the tensors.

    Options that are tensors are named by kind or switched on; their values follow from the seed.
    """

    dtype: str = "fp32"
    batch: int = 1
    num_heads: int = 1
    num_kv_heads: int = 1
    num_queries: int = 16
    num_keys: int = 16
    head_dim: int = 16
    value_dim: int = 16
    scale: float | None = None
    causal: Alignment | None = None
    window: tuple[int | None, int | None] | None = None
    mask: str | None = None
    bias: bool | str = False
    alibi: bool | str = False
    softcap: float | None = None
    sink: bool | str = False
    key_lengths: tuple[int, ...] | None = None
    segments: tuple[tuple[int, int], ...] | None = None
    family: str = "normal"
    gradient: str = "normal"
    seed: int = 0

    def build(self) -> Problem:
        """The problem; deterministic. Raises ArgumentError where the spec is illegal."""
        fmt = format_named(self.dtype)
        scale = 1.0 / math.sqrt(self.head_dim) if self.scale is None else self.scale
        sizes = Sizes(
            self.batch,
            self.num_heads,
            self.num_kv_heads,
            self.num_queries,
            self.num_keys,
            self.head_dim,
            self.value_dim,
            scale,
            fmt,
        )
        q, k, v = (x.to(fmt.dtype) for x in values(self.family, sizes, self.seed))
        problem = Problem(q, k, v, **self._options(), family=self.family, seed=self.seed)
        if self.gradient == "normal":  # what a problem without one is given for its backward
            return problem
        return problem.replaced(dout=output_gradient(self.gradient, problem))

    def _options(self) -> dict[str, Any]:
        """Every option of the problem, tensors included."""
        generator = torch.Generator().manual_seed(self.seed)
        lengths = None if self.key_lengths is None else torch.tensor(self.key_lengths)
        return {
            "scale": self.scale,
            "causal": self.causal,
            "window": self.window,
            "mask": None if self.mask is None else self._mask(generator),
            "bias": self._normal(generator, self._bias_shape(), bool(self.bias)),
            "alibi_slopes": self._slopes() if self.alibi else None,
            "softcap": self.softcap,
            "sink": self._sink(generator),
            "key_lengths": lengths,
            "cu_seqlens_q": self._ends(0),
            "cu_seqlens_k": self._ends(1),
        }

    def outline(self) -> Problem:
        """The problem with zeros for values: enough to ask whether a declaration covers it."""
        fmt = format_named(self.dtype)
        heads, kv, nq, nk = self.num_heads, self.num_kv_heads, self.num_queries, self.num_keys
        q = torch.zeros((), dtype=fmt.dtype).expand(self.batch, heads, nq, self.head_dim)
        k = torch.zeros((), dtype=fmt.dtype).expand(self.batch, kv, nk, self.head_dim)
        v = torch.zeros((), dtype=fmt.dtype).expand(self.batch, kv, nk, self.value_dim)
        return Problem(q, k, v, **self._options())

    def leaves_rows(self) -> bool:
        """Some row sees no key."""
        return not self.num_keys or bool((~self.outline().visible().any(-1)).any())

    def to_json(self) -> dict[str, Any]:
        """Plain data without the fields that have their default."""
        return {f.name: value for f in fields(self) if (value := getattr(self, f.name)) != f.default}

    @staticmethod
    def from_json(data: dict[str, Any]) -> ProblemSpec:
        """The inverse of ``to_json``; raises UnknownNameError for an unknown field."""
        known = {f.name for f in fields(ProblemSpec)}
        for key in data:
            if key not in known:
                raise UnknownNameError("spec field", key, known)
        return ProblemSpec(**{key: _tuples(value) for key, value in data.items()})

    def _normal(self, generator: torch.Generator, shape: tuple[int, ...], wanted: bool) -> Tensor | None:
        return torch.randn(shape, generator=generator) if wanted else None

    def _bias_shape(self) -> tuple[int, ...]:
        kind = "hqk" if isinstance(self.bias, bool) else self.bias
        if kind not in BIAS_KINDS:
            raise UnknownNameError("bias", kind, BIAS_KINDS)
        sizes = {"b": self.batch, "h": self.num_heads, "q": self.num_queries, "k": self.num_keys}
        return tuple(n if letter in kind else 1 for letter, n in sizes.items())

    def _sink(self, generator: torch.Generator) -> Tensor | None:
        if isinstance(self.sink, str) and self.sink not in SINK_KINDS:
            raise UnknownNameError("sink", self.sink, SINK_KINDS)
        logits = self._normal(generator, (self.num_heads,), bool(self.sink))
        return logits if logits is None else logits + {"low": -50.0, "high": 30.0}.get(str(self.sink), 0.0)

    def _slopes(self) -> Tensor:
        # ALiBi's own: a geometric sequence over the heads.
        slopes = 2.0 ** (-8.0 * torch.arange(1, self.num_heads + 1) / self.num_heads)
        if self.alibi is True:
            return slopes
        if self.alibi not in ALIBI_KINDS:
            raise UnknownNameError("alibi", str(self.alibi), ALIBI_KINDS)
        return slopes * torch.arange(1, self.batch + 1).unsqueeze(-1)

    def _ends(self, side: int) -> Tensor | None:
        if self.segments is None:
            return None
        lengths = torch.tensor([pair[side] for pair in self.segments])
        return torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])

    def _mask(self, generator: torch.Generator) -> Tensor:
        if self.mask not in MASK_KINDS:
            raise UnknownNameError("mask", str(self.mask), MASK_KINDS)
        heads = self.num_heads if self.mask == "per_head" else 1
        rows = 1 if self.mask == "keys" else self.num_queries
        shape = (self.batch, heads, rows, self.num_keys)
        seen = torch.rand(shape, generator=generator) < 0.5
        if self.num_keys == 0:
            return seen
        if self.mask == "first_key":
            seen = torch.zeros(shape, dtype=torch.bool)
            seen[..., 0] = True
            seen[..., self.num_keys // 2] = True
        elif self.mask == "holes":
            seen[..., ::3, :] = False
        else:
            anchor = torch.randint(self.num_keys, (*shape[:3], 1), generator=generator)
            seen = seen.scatter(-1, anchor, True)
        return seen


def _tuples(value: Any) -> Any:
    return tuple(_tuples(x) for x in value) if isinstance(value, list) else value
