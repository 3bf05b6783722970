"""Which problems of a plan get the checks that run the kernel again.

Such a check costs up to ten runs, so it is made on every n-th problem only: on problems that it applies to,
the cheap ones first, spread so that no problem carries many.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from flashcheck.checks import CHECKS
from flashcheck.inputs.spec import ProblemSpec
from flashcheck.inputs.values import FAMILIES

EVERY: dict[str, int] = {
    "special.nonfinite": 12,
    "isolation.buffers": 12,
    "bitwise.repeat": 16,
    "option.effect": 4,
    "backward.own_forward": 16,
    "backward.end_to_end": 16,
    "influence.forward": 8,
    "bitwise.batch": 10,
    "influence.perturbed": 16,
    "bitwise.scaling": 16,
    "bitwise.suffix": 16,
    "bitwise.orders": 16,
    "relation.key_permutation": 16,
    "relation.logit_shift": 16,
    "relation.unit_values": 16,
    "relation.repeated_heads": 16,
    "relation.scale_sign": 16,
    "relation.split_merge": 16,
    "state.interleaved": 16,
    "isolation.unwritten": 16,
    "special.empty_rows_backward": 16,
    "option.illegal": 16,
    "influence.backward": 32,
    "bitwise.gradient_scaling": 32,
    "relation.score_gradient": 32,
    "isolation.gradients_unwritten": 32,
    "isolation.backward": 32,
    "isolation.wide_strides": 64,
}
"""Check -> one problem in how many, at least one per dtype."""

ONCE = ("state.fresh_process",)
"""Made on one problem of the first dtype: a process costs seconds."""

ON_NOTHING = (
    "isolation.buffers",
    "isolation.unwritten",
    "isolation.gradients_unwritten",
    "special.empty_rows_backward",
)
"""Made on every problem without queries or keys, or with a sequence without: kernels leave early there, and
what they return was never written, or reads what is not there."""

ALTERNATE = ("backward.bound", "backward.algorithm", "relation.gradient_sums")
"""Made on every other problem, together: they share one run of the backward. Made on every one
whose scores lie far below 0, where exp(-LSE) overflows (golden/findings/022)."""


def _positional(spec: ProblemSpec) -> bool:
    hides = (spec.causal, spec.window, spec.key_lengths, spec.segments)
    return bool(spec.alibi) or any(x is not None for x in hides)


_SUITS: dict[str, Callable[[ProblemSpec], bool]] = {
    "bitwise.batch": lambda s: s.batch * s.num_kv_heads > 1,
    "bitwise.suffix": lambda s: s.num_keys > 1 and (_positional(s) or s.mask is not None),
    "relation.key_permutation": lambda s: s.num_keys > 1 and not _positional(s),
    "relation.logit_shift": lambda s: not s.sink,
    "relation.repeated_heads": lambda s: s.num_heads > s.num_kv_heads,
    "relation.scale_sign": lambda s: s.scale != 0,
    "relation.split_merge": lambda s: s.num_keys > 1 and not s.sink,
    "relation.score_gradient": lambda s: not s.sink,
    "special.empty_rows_backward": lambda s: s.leaves_rows(),
    "isolation.wide_strides": lambda s: s.num_kv_heads > 1,
    "influence.backward": lambda s: max(s.num_queries, s.num_keys) <= 2 * min(s.head_dim, s.value_dim),
}


_PREFERS: dict[str, Callable[[ProblemSpec], bool]] = {
    "isolation.buffers": lambda s: s.key_lengths is not None and min(s.key_lengths) < s.num_keys,
    "bitwise.orders": lambda s: s.batch > 1,  # pages of one sequence are not told from another's
}
"""Problems on which a check sees more: one of these first, where the plan has one."""


def suits(name: str, spec: ProblemSpec) -> bool:
    """A check that runs the kernel again has something to say on this problem, at a price worth paying."""
    if "overflows" in FAMILIES[spec.family].properties or not (spec.num_queries and spec.num_keys):
        return False
    return name not in _SUITS or _SUITS[name](spec)


def lacks(spec: ProblemSpec) -> bool:
    """No queries, no keys, or a first sequence that has none of one of them."""
    packed = {n for pair in spec.segments or () if any(pair) for n in pair}
    return 0 in {spec.num_queries, spec.num_keys, *packed, *(spec.key_lengths or ())[:1]}


def cost(spec: ProblemSpec) -> int:
    """Work of one run, in padded pairs of a query and a key."""
    sides = [-(-max(n, 1) // 64) for n in (spec.num_queries, spec.num_keys)]
    return spec.batch * spec.num_heads * sides[0] * sides[1]


_FEW_RUNS = 4


def _work(name: str, spec: ProblemSpec) -> int:
    """Work of a check on a problem, up to what it costs everywhere."""
    if name != "influence.forward":
        return cost(spec)
    # It reads the keys off the columns of V: 127 keys and one column are 127 runs. A few runs are no reason
    # to leave long rows out.
    return cost(spec) * -(-spec.num_keys // (_FEW_RUNS * spec.value_dim))


def assigned(specs: Sequence[ProblemSpec], first_dtype: bool) -> list[tuple[str, ...]]:
    """Names of the checks of every problem of one dtype, in the order of ``CHECKS``."""
    chosen: list[set[str]] = [set() for _ in specs]
    load = [0.0] * len(specs)
    for number, names in enumerate(chosen):
        for name, check in CHECKS.items():
            every = name in ALTERNATE and (number % 2 == 0 or specs[number].family == "very_negative")
            if not check.grouped and (every or not (name in EVERY or name in ONCE or name in ALTERNATE)):
                names.add(name)
        names |= set(ON_NOTHING if lacks(specs[number]) else ())
    wanted = {name: max(1, round(len(specs) / n)) for name, n in EVERY.items()}
    if first_dtype:
        wanted |= dict.fromkeys(ONCE, 1)
    for name in sorted(wanted, key=lambda n: -CHECKS[n].reruns):
        fitting = [i for i, spec in enumerate(specs) if suits(name, spec)]
        for number in range(wanted[name]):
            if not fitting:
                break
            preferred = [i for i in fitting if number == 0 and name in _PREFERS and _PREFERS[name](specs[i])]
            work = {i: (load[i] + CHECKS[name].reruns) * _work(name, specs[i]) for i in fitting}
            best = min(preferred or fitting, key=work.__getitem__)
            fitting.remove(best)
            chosen[best].add(name)
            load[best] += CHECKS[name].reruns + 1
    return [tuple(n for n in CHECKS if n in names) for names in chosen]
