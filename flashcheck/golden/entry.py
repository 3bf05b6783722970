"""What a golden problem is before its answer is known, and the registry of groups."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from flashcheck.formats import BF16, E4M3, E5M2, FP16, FP32, Format
from flashcheck.golden.draw import Draw, stored
from flashcheck.problem import Problem

FORMATS = (FP32, FP16, BF16, E4M3, E5M2)

FLAGS: dict[str, str] = {
    "Ordinary": "nothing unusual: a kernel that fails here fails everywhere",
    "HugeLogits": "scores beyond 100; wrong shifts, overflow of exp or of the running maximum",
    "BeyondFloat64": "float64 gives a wrong answer; the expected one is exact",
    "BeyondFloat32": "scores lie past the range of float32: inf or NaN is legal, a wrong number is not",
    "EmptyRows": "some query sees no key: O = 0, LSE = -inf (with a sink, its logit), no gradient",
    "ZeroLength": "a length is 0",
    "SingleKey": "every query sees one key: O is that key's value",
    "Ties": "largest scores are equal",
    "NearTies": "largest scores differ by far less than their size",
    "Profile": "scores rise or fall along the keys, so that the running maximum moves at every tile or never",
    "Cancellation": "sums whose terms cancel",
    "Outliers": "a few values are 100 times the others",
    "Subnormal": "operands among the subnormal numbers: flushing to zero shows",
    "Saturation": "values at the end of the format; fp8 conversions saturate",
    "OutputOverflow": "the exact output passes the end of the output format",
    "ExactTie": "some expected value lies on a rounding boundary, or is 0 because terms cancel exactly",
    "NonFinite": "NaN or inf in data that is visible; it reaches the rows that see it and no other",
    "Poison": "NaN or inf in data that no query sees: it must not matter",
    "TileEdge": "a length at, just under or just over a multiple of 16",
    "Grouped": "fewer key/value heads than query heads",
    "Descale": "stored values stand for value * descale",
    "Lse": "the log-sum-exp has a gradient of its own",
    "Scale": "a scale other than 1/sqrt(dim)",
    "Causal": "causal mask",
    "Window": "sliding window",
    "Mask": "dense boolean mask",
    "Bias": "additive bias",
    "Alibi": "ALiBi slopes",
    "Softcap": "scores pass through c tanh(x / c)",
    "Sink": "an extra logit in the denominator",
    "KeyLengths": "keys past a length are padding",
    "Packed": "several sequences packed into one",
}
"""Flag -> what it marks. Option flags are set by the options, the others by the groups."""

_OPTION_FLAGS = {
    "scale": "Scale",
    "causal": "Causal",
    "window": "Window",
    "mask": "Mask",
    "bias": "Bias",
    "alibi_slopes": "Alibi",
    "softcap": "Softcap",
    "sink": "Sink",
    "key_lengths": "KeyLengths",
    "cu_seqlens": "Packed",
}


@dataclass(frozen=True, eq=False, slots=True)
class Entry:
    """One problem of a group.

    Attributes:
        id: group, format and what is special, joined by dots; unique.
        purpose: what it is for, one sentence.
        flags: names out of ``FLAGS``.
        problem: with ``dout`` where gradients are expected.
        notes: legal alternatives and other remarks.
    """

    id: str
    purpose: str
    flags: tuple[str, ...]
    problem: Problem
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Group:
    """A file of problems."""

    name: str
    about: str
    make: Callable[[], Iterator[Entry]]

    @cached_property
    def _entries(self) -> list[Entry]:
        return list(self.make())

    def entries(self) -> list[Entry]:
        """All of them, made once."""
        return self._entries


GROUPS: dict[str, Group] = {}


def group(name: str, about: str) -> Callable[[Callable[[], Iterator[Entry]]], Callable[[], Iterator[Entry]]]:
    """Registers the decorated generator of entries as a group."""

    def register(make: Callable[[], Iterator[Entry]]) -> Callable[[], Iterator[Entry]]:
        GROUPS[name] = Group(name, about, make)
        return make

    return register


def output_format(fmt: Format) -> Format:
    """What kernels write for inputs of this format: fp8 inputs give bf16."""
    return BF16 if fmt in (E4M3, E5M2) else fmt


@dataclass(frozen=True, slots=True)
class Sizes:
    """Shapes of a problem."""

    nq: int = 5
    nk: int = 7
    dim: int = 8
    value_dim: int = 0
    heads: int = 1
    kv_heads: int = 1
    batch: int = 1

    @property
    def q(self) -> tuple[int, ...]:
        return self.batch, self.heads, self.nq, self.dim

    @property
    def k(self) -> tuple[int, ...]:
        return self.batch, self.kv_heads, self.nk, self.dim

    @property
    def v(self) -> tuple[int, ...]:
        return self.batch, self.kv_heads, self.nk, self.value_dim or self.dim

    @property
    def out(self) -> tuple[int, ...]:
        return self.batch, self.heads, self.nq, self.value_dim or self.dim

    @property
    def pairs(self) -> tuple[int, ...]:
        return self.batch, self.heads, self.nq, self.nk


def entry(
    name: str,
    fmt: Format,
    values: tuple[Tensor, Tensor, Tensor],
    purpose: str,
    *flags: str,
    dout: Tensor | None = None,
    notes: tuple[str, ...] = (),
    backward: bool = True,
    **options: Any,
) -> Entry:
    """An entry from float64 q, k, v, which are rounded into the format.

    Args:
        dout: the output's gradient in float64; None: drawn from the name.
        options: fields of ``Problem``; tensors in float64 become fp32 (bias, slopes, sink, dlse).
    """
    q, k, v = (x if x.dtype == fmt.dtype else stored(x, fmt) for x in values)
    narrow: dict[str, Any] = {
        key: x.float() if isinstance(x, Tensor) and x.dtype == torch.float64 else x
        for key, x in options.items()
    }
    problem = Problem(q=q, k=k, v=v, **narrow)
    if backward:
        shape = (problem.batch, problem.num_heads, problem.num_queries, problem.value_dim)
        grad = Draw(f"{name}/dout").normal(*shape) if dout is None else dout
        problem = problem.replaced(dout=stored(grad, output_format(fmt)))
    return Entry(name, purpose, _all_flags(problem, flags), problem, notes)


def _all_flags(problem: Problem, given: tuple[str, ...]) -> tuple[str, ...]:
    found = set(given) | {_OPTION_FLAGS[name] for name in problem.options()}
    if problem.group > 1:
        found.add("Grouped")
    if any(getattr(problem, f"{x}_descale") != 1.0 for x in "qkv"):
        found.add("Descale")
    if problem.dlse is not None:
        found.add("Lse")
    if 0 in (problem.num_queries, problem.num_keys):
        found.add("ZeroLength")
    if problem.num_queries and not bool(problem.visible().any(-1).all()):
        found.add("EmptyRows")
    assert found <= set(FLAGS), found - set(FLAGS)
    return tuple(name for name in FLAGS if name in found)
