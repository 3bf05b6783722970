"""What a kernel is compiled for, and how a shard keeps to a few such signatures.

On a GPU a new combination of dtype, padded head dims and options costs seconds of compilation, a case
milliseconds. A focus narrows the declaration to one octave of head dims and a few options: a shard inside
it meets some dozen signatures, which can be compiled ahead.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from flashcheck.inputs.problems import draw_spec
from flashcheck.inputs.spec import ProblemSpec
from flashcheck.kernel import Capabilities

OCTAVES = ((1, 16), (17, 32), (33, 64), (65, 128), (129, 256), (257, 1024))
"""Head dims that kernels pad to one size."""

OPTIONS_AT_ONCE = 2
ALWAYS = ("scale", "causal")
"""Options that every focus has: a scale is a runtime number, causality the usual case."""


@dataclass(frozen=True, slots=True)
class Focus:
    """Part of a declaration: one dtype, head dims low..high, some of the options; None: all."""

    dtype: str
    head_dim: tuple[int, int] | None = None
    options: tuple[str, ...] | None = None

    def narrowed(self, capabilities: Capabilities) -> Capabilities:
        """The declaration of a kernel that could do no more than this."""
        if self.head_dim is None or self.options is None:
            return capabilities
        options = tuple(o for o in capabilities.options if o in (*ALWAYS, *self.options))
        return replace(capabilities, head_dim=self.head_dim, options=options)

    def describe(self) -> str:
        if self.head_dim is None or self.options is None:
            return self.dtype
        return f"{self.dtype} d={self.head_dim[0]}..{self.head_dim[1]} {'+'.join(self.options) or 'plain'}"


def derived(spec: ProblemSpec, backward: bool) -> str:
    """The signature assumed where none is declared: dtype, padded head dims, which options are set."""
    options = [
        name
        for name in (
            "causal",
            "window",
            "mask",
            "bias",
            "alibi",
            "softcap",
            "sink",
            "key_lengths",
            "segments",
        )
        if getattr(spec, name) not in (None, False)
    ]
    dims = [
        next((high for low, high in OCTAVES if low <= d <= high), d) for d in (spec.head_dim, spec.value_dim)
    ]
    passes = "forward+backward" if backward else "forward"
    return f"{spec.dtype} {dims[0]}/{dims[1]} {spec.causal} {'+'.join(options)} {passes}"


def draw_focus(rng: random.Random, capabilities: Capabilities, dtypes: tuple[str, ...]) -> Focus:
    """A random part of the declaration; plain problems as often as any two options."""
    low, high = capabilities.head_dim
    step = capabilities.head_dim_multiple
    ranges = [(max(low, a), min(high, b)) for a, b in OCTAVES]
    ranges = [(a, b) for a, b in ranges if a <= b and -(-a // step) * step <= b]
    others = [o for o in capabilities.options if o not in ALWAYS]
    picked = rng.sample(others, rng.randint(0, min(OPTIONS_AT_ONCE, len(others))))
    return Focus(rng.choice(dtypes), rng.choice(ranges), tuple(sorted(picked)))


def samples(
    focus: Focus, capabilities: Capabilities, backward: bool, seed: int, most: int = 40
) -> list[ProblemSpec]:
    """One problem for each signature that random draws inside the focus meet: what to compile ahead."""
    rng = random.Random(seed)
    narrow = focus.narrowed(capabilities)
    found: dict[str, ProblemSpec] = {}
    for attempt in range(4 * most):
        spec = draw_spec(rng, narrow, focus.dtype, attempt)
        if capabilities.refuses(spec.outline()) is None:
            found.setdefault(derived(spec, backward), spec)
        if len(found) >= most:
            break
    return list(found.values())
