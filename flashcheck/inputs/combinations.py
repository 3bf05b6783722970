"""Pairs and triples of declared option values: which exist, which a problem covers, how to cover the rest.

A factor is an option or a size relation with a handful of values that change what a kernel does. Problems
are built greedily, each for as many uncovered combinations as it can hold (a covering array); combinations
that the declaration or the contract forbids are told apart by trial and do not count.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass
from typing import Any

from flashcheck.inputs.problems import GRADIENTS, GROUPED_HEADS, HEADS, MAX_ROWS, USUAL_HEAD_DIMS, head_dims
from flashcheck.inputs.spec import ALIBI_KINDS, BIAS_KINDS, MASK_KINDS, SINK_KINDS, ProblemSpec
from flashcheck.kernel import Capabilities

Choice = tuple[str, str]
"""A factor and one of its values, as words."""

Combination = frozenset[Choice]

WINDOWS: dict[str, tuple[int | None, int | None]] = {
    "0,0": (0, 0),
    "1,0": (1, 0),
    "17,5": (17, 5),
    "any,2": (None, 2),
    "31,any": (31, None),
}
SOFTCAPS = {"1": 1.0, "15": 15.0, "50": 50.0}
SCALES = {"1": 1.0, "0.25": 0.25, "0": 0.0, "-0.125": -0.125}
_LENGTHS = (1, 2, 15, 16, 17, 31, 32, 33, 47, 63, 64, 65)

_TRIALS = 30
_CANDIDATES = 6


def factors(capabilities: Capabilities) -> dict[str, tuple[str, ...]]:
    """Factor -> its values, out of what is declared; factors with a single value are left out."""
    options = set(capabilities.options)
    found: dict[str, tuple[str, ...]] = {}
    if "causal" in options:
        found["causal"] = ("none", *capabilities.causal)
    if "scale" in options:
        found["scale"] = ("default", *SCALES)
    if "window" in options:
        found["window"] = ("none", *WINDOWS)
    if "mask" in options:
        found["mask"] = ("none", *(m for m in MASK_KINDS if m != "holes" or capabilities.empty_rows))
    if "bias" in options:
        found["bias"] = ("none", *BIAS_KINDS)
    if "softcap" in options:
        found["softcap"] = ("none", *SOFTCAPS)
    kinds = {"alibi_slopes": ALIBI_KINDS, "sink": SINK_KINDS, "key_lengths": (), "cu_seqlens": ()}
    for name, special in kinds.items():
        if name in options:
            found[name] = ("none", "set", *special)
    found["heads"] = ("equal", "grouped") if capabilities.gqa else ("equal",)
    found["value dim"] = ("same", "other") if capabilities.value_dim_differs else ("same",)
    found["lengths"] = ("Nq = Nk", "Nq < Nk", "Nq > Nk") if capabilities.cross_lengths else ("Nq = Nk",)
    return {name: values for name, values in found.items() if len(values) > 1}


def choices_of(spec: ProblemSpec, capabilities: Capabilities) -> frozenset[Choice]:
    """What a spec has chosen of the declared factors; a value outside the factor's list chooses nothing."""
    bias = "hqk" if spec.bias is True else spec.bias or "none"
    words = {
        "causal": spec.causal or "none",
        "scale": "default" if spec.scale is None else _word(SCALES, spec.scale),
        "window": "none" if spec.window is None else _word(WINDOWS, spec.window),
        "mask": spec.mask or "none",
        "bias": bias,
        "softcap": "none" if spec.softcap is None else _word(SOFTCAPS, spec.softcap),
        "alibi_slopes": _switch(spec.alibi),
        "sink": _switch(spec.sink),
        "key_lengths": "set" if spec.key_lengths is not None else "none",
        "cu_seqlens": "set" if spec.segments is not None else "none",
        "heads": "grouped" if spec.num_heads > spec.num_kv_heads else "equal",
        "value dim": "other" if spec.value_dim != spec.head_dim else "same",
        "lengths": _relation(spec.num_queries, spec.num_keys),
    }
    declared = factors(capabilities)
    return frozenset((f, str(words[f])) for f, values in declared.items() if words[f] in values)


def _switch(value: bool | str) -> str:
    return value if isinstance(value, str) else "set" if value else "none"


def _word(table: dict[str, Any], value: object) -> str:
    return next((word for word, known in table.items() if known == value), "")


def _relation(nq: int, nk: int) -> str:
    return "Nq = Nk" if nq == nk else "Nq < Nk" if nq < nk else "Nq > Nk"


def combinations_of(choices: frozenset[Choice], strength: int) -> set[Combination]:
    """All combinations of ``strength`` choices that a problem covers."""
    return {frozenset(c) for c in itertools.combinations(sorted(choices), strength)}


def all_combinations(capabilities: Capabilities, strength: int) -> set[Combination]:
    """Every combination of values of ``strength`` factors, the forbidden ones included."""
    return {
        frozenset(chosen)
        for some in itertools.combinations(factors(capabilities).items(), strength)
        for chosen in itertools.product(*([(name, v) for v in values] for name, values in some))
    }


@dataclass(slots=True)
class Covering:
    """What is left to cover.

    Attributes:
        capabilities: the declaration; strength: 2 for pairs, 3 for triples.
        open: combinations not covered yet; forbidden: those for which no legal problem was found.
    """

    capabilities: Capabilities
    strength: int
    open: set[Combination]
    forbidden: set[Combination]

    @staticmethod
    def of(capabilities: Capabilities, strength: int) -> Covering:
        return Covering(capabilities, strength, all_combinations(capabilities, strength), set())

    def cover(self, spec: ProblemSpec) -> None:
        """Takes what ``spec`` covers off the list."""
        self.open -= combinations_of(choices_of(spec, self.capabilities), self.strength)

    def next_spec(self, rng: random.Random, dtype: str, family: str) -> ProblemSpec | None:
        """A legal spec for the first open combination and as many others as it can hold; None: all done."""
        while self.open:
            wanted = min(self.open, key=sorted)
            best: tuple[int, ProblemSpec] | None = None
            legal = 0
            for _ in range(_TRIALS):
                spec = build(rng, self.capabilities, self._row(rng, wanted), dtype, family)
                if spec is None or not is_legal(spec, self.capabilities):
                    continue
                legal += 1
                gain = len(combinations_of(choices_of(spec, self.capabilities), self.strength) & self.open)
                if best is None or gain > best[0]:
                    best = (gain, spec)
                if legal >= _CANDIDATES:
                    break
            best = best or self._at_random(wanted, dtype, family)
            if best is not None and best[0]:
                self.cover(best[1])
                return best[1]
            self.open.discard(wanted)
            self.forbidden.add(wanted)
        return None

    def _at_random(self, wanted: Combination, dtype: str, family: str) -> tuple[int, ProblemSpec] | None:
        """A legal spec with ``wanted`` and all else at rest, or drawn without regard to what it covers: the
        values that would cover most may be forbidden together with ``wanted``, every time."""
        rng = random.Random(str(sorted(wanted)))  # its own: what else is drawn stays as it was
        declared = factors(self.capabilities)
        for trial in range(_TRIALS):
            rest = {
                name: values[0] if trial == 0 else rng.choice(values) for name, values in declared.items()
            }
            spec = build(rng, self.capabilities, rest | dict(wanted), dtype, family)
            if spec is None or not is_legal(spec, self.capabilities):
                continue
            covers = combinations_of(choices_of(spec, self.capabilities), self.strength)
            if wanted in covers:
                return len(covers & self.open), spec
        return None

    def _row(self, rng: random.Random, wanted: Combination) -> dict[str, str]:
        """Values for all factors: ``wanted`` and, factor by factor, what covers most with those before it."""
        row = dict(wanted)
        declared = factors(self.capabilities)
        rest = [name for name in declared if name not in row]
        rng.shuffle(rest)
        for name in rest:
            scores = {value: self._gain(row, (name, value)) for value in declared[name]}
            top = max(scores.values())
            row[name] = rng.choice([v for v, score in scores.items() if score == top])
            if rng.random() < 0.15:  # what scores best may be illegal together
                row[name] = rng.choice(declared[name])
        return row

    def _gain(self, row: dict[str, str], choice: Choice) -> int:
        others = itertools.combinations(row.items(), self.strength - 1)
        return sum(frozenset((*some, choice)) in self.open for some in others)


def is_legal(spec: ProblemSpec, capabilities: Capabilities) -> bool:
    """The declaration covers the spec."""
    if capabilities.refuses(spec.outline()) is not None:
        return False
    return capabilities.empty_rows or not spec.leaves_rows()


def build(
    rng: random.Random, capabilities: Capabilities, row: dict[str, str], dtype: str, family: str
) -> ProblemSpec | None:
    """A spec with these values; free sizes are drawn. None where the values contradict each other."""
    relation = row.get("lengths", "Nq = Nk")
    nq, nk = map(capabilities.whole, sorted(rng.sample(_LENGTHS, 2)))
    if relation == "Nq = Nk":
        nq = nk
    elif relation == "Nq > Nk":
        nq, nk = nk, nq
    dims = head_dims(capabilities)
    usual = tuple(d for d in dims if d in USUAL_HEAD_DIMS and d <= 64) or dims
    dim = rng.choice(usual if rng.random() < 0.7 else dims)
    value_dim = dim
    if row.get("value dim") == "other":
        value_dim = rng.choice([d for d in dims if d != dim and d <= 96] or [d for d in dims if d != dim])
    heads, kv_heads = rng.choice(GROUPED_HEADS if row.get("heads") == "grouped" else HEADS)
    packed = row.get("cu_seqlens") == "set"
    batch = 1 if packed else rng.choice((1, 2))
    while batch > 1 and batch * heads * nq > MAX_ROWS:
        batch -= 1
    lengths = None
    if row.get("key_lengths") == "set":
        low = 0 if capabilities.empty_rows else 1
        lengths = tuple(rng.randint(min(low, nk), nk) for _ in range(batch))
    segments = None
    if packed:
        cut_q, cut_k = (nq // 3, nk // 2) if relation != "Nq = Nk" else (nq // 3, nq // 3)
        segments = ((cut_q, cut_k), (0, 0), (nq - cut_q, nk - cut_k))
    bias = row.get("bias", "none")
    mask = row.get("mask", "none")
    causal = row.get("causal", "none")
    return ProblemSpec(
        dtype=dtype,
        batch=batch,
        num_heads=heads,
        num_kv_heads=kv_heads,
        num_queries=nq,
        num_keys=nk,
        head_dim=dim,
        value_dim=value_dim,
        scale=SCALES.get(row.get("scale", "default")),
        causal=None if causal == "none" else causal,  # type: ignore[arg-type]
        window=WINDOWS.get(row.get("window", "none")),
        mask=None if mask == "none" else mask,
        bias=False if bias == "none" else bias,
        gradient=rng.choice(GRADIENTS),
        alibi=_kind(row.get("alibi_slopes", "none")),
        softcap=SOFTCAPS.get(row.get("softcap", "none")),
        sink=_kind(row.get("sink", "none")),
        key_lengths=lengths,
        segments=segments,
        family=family,
        seed=rng.randrange(2**31),
    )


def _kind(word: str) -> bool | str:
    """The inverse of ``_switch``."""
    return {"none": False, "set": True}.get(word, word)
