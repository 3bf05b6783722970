"""Which problems a kernel is judged on, and by which checks: declared capabilities and a level in, cases out.

A plan is deterministic in (capabilities, level, dtypes, seed). It opens with one case for everything
that the declaration obliges (``coverage.required``), goes on with problems that cover all pairs
(``thorough``: triples) of declared option values, and ends with random draws.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import torch

from flashcheck.checks.judged import on_device
from flashcheck.errors import ArgumentError, UnknownNameError
from flashcheck.inputs.combinations import Covering
from flashcheck.inputs.coverage import covered, empty_sequences, required, takes_part
from flashcheck.inputs.problems import Wishes, draw_spec, families_for
from flashcheck.inputs.spec import ProblemSpec
from flashcheck.inputs.values import FAMILIES
from flashcheck.kernel import Capabilities, Kernel
from flashcheck.reruns import assigned


@dataclass(frozen=True, slots=True)
class Level:
    """How much a plan holds.

    Attributes:
        problems: per dtype, at least; what the declaration obliges and covers is never left out.
        strength: combinations of that many declared option values are all covered; 1: each value once.
    """

    problems: int
    strength: int


LEVELS: dict[str, Level] = {
    "quick": Level(1, 1),
    "standard": Level(64, 2),
    "thorough": Level(1000, 3),
}
"""quick: what the declaration obliges; standard: all pairs of option values; thorough: all triples."""

DEFAULT_LEVEL = "quick"  # everything declared, once: a first certificate within two minutes
DEFAULT_SEED = 20260  # fixed: two runs of one version judge the same problems

LARGEST_TILE = 512
"""Tiles above this are not tried at their edges: such problems take too long in an interpreter."""

_ATTEMPTS = 200


@dataclass(frozen=True, slots=True)
class Case:
    """One problem to judge.

    Attributes:
        spec: the problem.
        checks: names of the checks to make.
        reason: what of the declaration it is there for; "" for a random draw.
    """

    spec: ProblemSpec
    checks: tuple[str, ...]
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Plan:
    """All cases, dtype after dtype.

    Attributes:
        cases: in the order in which they run.
        unplanned: dtype -> declared features for which no legal problem was found.
        forbidden: how many pairs (or triples) the declaration excludes; the level's strength counts.
    """

    level: str
    seed: int
    dtypes: tuple[str, ...]
    cases: tuple[Case, ...]
    unplanned: dict[str, tuple[str, ...]]
    forbidden: int = 0


def make_plan(
    kernel: Kernel,
    level: str = DEFAULT_LEVEL,
    dtypes: tuple[str, ...] = (),
    max_cases: int | None = None,
    seed: int = DEFAULT_SEED,
    device: str = "cpu",
) -> Plan:
    """The plan for a kernel.

    Args:
        level: ``quick``, ``standard`` or ``thorough``.
        dtypes: narrows the declared ones; empty: all.
        max_cases: problems per dtype in place of the level's number.
        seed: of all random draws.
        device: where the kernel will run; the tile sizes that it declares there set some lengths.

    Raises:
        UnknownNameError: for a level that does not exist or a dtype that the kernel does not declare.
    """
    if level not in LEVELS:
        raise UnknownNameError("level", level, LEVELS)
    if max_cases is not None and max_cases < 1:
        raise ArgumentError("max_cases", max_cases, "a positive integer")
    capabilities = kernel.capabilities
    for dtype in dtypes:
        if dtype not in capabilities.dtypes:
            raise UnknownNameError("dtype", dtype, capabilities.dtypes)
    chosen = dtypes or capabilities.dtypes
    cases: list[Case] = []
    unplanned: dict[str, tuple[str, ...]] = {}
    forbidden = 0
    for dtype in chosen:
        edges = (*tile_edges(kernel, dtype, device), *open_windows(capabilities), *whole_tiles(capabilities))
        specs, missing, excluded = _specs(capabilities, dtype, LEVELS[level], max_cases, seed, edges)
        checks = assigned([spec for spec, _ in specs], dtype == chosen[0])
        cases += [Case(spec, names, why) for (spec, why), names in zip(specs, checks, strict=True)]
        forbidden = max(forbidden, excluded)
        if missing:
            unplanned[dtype] = missing
    return Plan(level, seed, chosen, tuple(cases), unplanned, forbidden)


def _specs(
    capabilities: Capabilities,
    dtype: str,
    level: Level,
    max_cases: int | None,
    seed: int,
    edges: tuple[tuple[Wishes, str], ...],
) -> tuple[list[tuple[ProblemSpec, str]], tuple[str, ...], int]:
    """Specs with what each is there for; declared features without a legal problem; excluded combinations."""
    rng = random.Random(f"{seed}/{dtype}")
    specs: list[tuple[ProblemSpec, str]] = []
    missing: list[str] = []
    families = [name for name in families_for(capabilities) if "overflows" not in FAMILIES[name].properties]
    unused = list(families)  # each obliged feature brings one family along, so that both are covered at once
    for label, wishes in required(capabilities).items():
        if label.startswith("values ") and wishes.family in families and wishes.family not in unused:
            continue
        chosen = wishes if wishes.family is not None else replace(wishes, family=_next(unused, families, rng))
        spec = _legal(rng, capabilities, dtype, chosen, label)
        if spec is None:
            missing.append(label)
            continue
        if spec.family in unused:
            unused.remove(spec.family)
        specs.append((spec, label))
    for edge, label in edges if level.strength > 1 else ():
        free = edge.family is None
        chosen = replace(edge, family=_next(unused, families, rng)) if free else edge
        spec = _legal(rng, capabilities, dtype, chosen)
        if spec is not None:
            specs.append((spec, label))
    # A given number of problems is kept to; combinations that then stay open make a run incomplete.
    covering = Covering.of(capabilities, level.strength)
    for spec, _ in specs:
        covering.cover(spec)
    while level.strength > 1 and (max_cases is None or len(specs) < max_cases):
        spec = covering.next_spec(rng, dtype, families[len(specs) % len(families)])
        if spec is None:
            break
        specs.append((spec, "pairs" if level.strength == 2 else "triples"))
    total = max(level.problems, len(specs)) if max_cases is None else max_cases
    while len(specs) < total:
        spec = _legal(rng, capabilities, dtype, Wishes(family=families[len(specs) % len(families)]))
        if spec is None:
            break
        specs.append((spec, ""))
    return specs[:total], tuple(missing), len(covering.forbidden)


def tile_edges(kernel: Kernel, dtype: str, device: str) -> tuple[tuple[Wishes, str], ...]:
    """Problems about the tile sizes that the kernel declares, and what each is there for.

    (Nq, Nk) just under, at and just over them, and over two of them. With windows also one that hides the
    first key tile that a query tile visits from all of its rows but one: their running maximum is then -inf.
    """
    low, high = kernel.capabilities.head_dim
    dim = min(max(64, low), high)
    spec = ProblemSpec(dtype=dtype, num_queries=128, num_keys=128, head_dim=dim, value_dim=dim)
    try:
        declared = kernel.arithmetic(on_device(spec.outline(), torch.device(device)))
    except (ArgumentError, RuntimeError, KeyError):
        return ()
    sizes = [t for t in (declared.block_keys,) if t is not None and t <= LARGEST_TILE]
    rows = [t for t in (declared.block_queries,) if t is not None and t <= LARGEST_TILE]
    edges = [(17, t + step) for t in sizes for step in (-1, 0, 1)] + [(33, 2 * t + 1) for t in sizes]
    edges += [(t + step, 17) for t in rows for step in (-1, 1)]
    if not kernel.capabilities.cross_lengths:
        edges = [(max(pair), max(pair)) for pair in edges if max(pair) <= 257]
    legal = dict.fromkeys(pair for pair in edges if min(pair) > 0)
    wanted = [(Wishes(lengths=pair), f"tile edge {pair[0]} x {pair[1]}") for pair in legal]
    for keys in sizes if "window" in kernel.capabilities.options else ():
        wanted.append(
            (_hidden_tile(keys, rows[0] if rows else keys, dim), "a window that hides a visited tile")
        )
    return tuple(wanted)


def open_windows(capabilities: Capabilities) -> tuple[tuple[Wishes, str], ...]:
    """Windows without a limit to one side where the other length is by far the larger one.

    A number put in the place of "no limit" (finding 016) must hide nothing however far the diagonal lies.
    """
    if "window" not in capabilities.options or not capabilities.cross_lengths:
        return ()
    sides: tuple[tuple[tuple[int | None, int | None], tuple[int, int]], ...] = (
        ((2, None), (97, 3)),
        ((None, 2), (3, 97)),
        ((None, 2), (97, 3)),
    )
    return tuple(
        (
            Wishes(option="window", window=window, lengths=lengths, causal="none"),
            f"window {window} over {lengths[0]} x {lengths[1]}",
        )
        for window, lengths in sides
    )


def whole_tiles(capabilities: Capabilities) -> tuple[tuple[Wishes, str], ...]:
    """Lengths that leave nothing ragged in a tile and half of a larger one empty, with scores far below 0.

    The empty half has scores of 0, far above the others and above their log-sum-exp: a kernel that masks by
    the smaller tile counts them, or overflows in exp(0 - LSE) (finding 022).
    """
    lengths: tuple[tuple[int, int], ...] = ((17, 64), (33, 192), (17, 96), (64, 17))
    if not capabilities.cross_lengths:
        lengths = ((64, 64), (192, 192), (96, 96))
    return tuple(
        (
            Wishes(family="very_negative", lengths=pair, causal="none", plain=True, scale=0.25),
            f"whole tiles {pair[0]} x {pair[1]}",
        )
        for pair in lengths
    )


def _hidden_tile(keys: int, queries: int, head_dim: int) -> Wishes:
    """The first row of a query tile sees the last key of a key tile, and its other rows see none of it."""
    first = -(-keys // queries) * queries  # a query tile begins here, with a whole key tile before it
    length = first + max(queries // 2, 2)
    left = (first + 1) % keys  # row ``first`` begins at key first - left, which is -1 modulo ``keys``
    return Wishes(option="window", window=(left, 8), lengths=(length, length), head_dim=head_dim)


def _next(unused: list[str], families: list[str], rng: random.Random) -> str:
    return unused[0] if unused else rng.choice(families)


def _legal(
    rng: random.Random, capabilities: Capabilities, dtype: str, wishes: Wishes, label: str = ""
) -> ProblemSpec | None:
    """A drawn spec that the declaration does not exclude; None after many attempts.

    The option that ``label`` names takes part in it.
    """
    sequences = empty_sequences(capabilities)
    option = "causal" if label.startswith("causal=") else label.removeprefix("option ")
    for _ in range(_ATTEMPTS):
        spec = draw_spec(rng, capabilities, dtype, rng.randrange(2**31), wishes)
        outline = spec.outline()
        if (
            capabilities.refuses(outline) is None
            and (capabilities.empty_rows or not spec.leaves_rows())
            and takes_part(outline, option)
            and (label not in sequences or label in covered(spec, outline))
        ):
            return spec
    return None
