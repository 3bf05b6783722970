"""Plans hold every pair of declared option values, and every check on problems that it applies to."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from dataclasses import replace

import pytest

from flashcheck import emulator
from flashcheck.arithmetic import flash
from flashcheck.checks import CHECKS
from flashcheck.formats import BF16
from flashcheck.inputs.combinations import (
    Covering,
    all_combinations,
    build,
    choices_of,
    combinations_of,
    factors,
    is_legal,
)
from flashcheck.inputs.coverage import covered, required
from flashcheck.inputs.spec import ProblemSpec
from flashcheck.kernel import ForwardResult, Kernel
from flashcheck.loading import load
from flashcheck.plan import make_plan
from flashcheck.problem import Problem
from flashcheck.reruns import ALTERNATE, EVERY, ON_NOTHING, ONCE, assigned, lacks
from tests.inputs.test_specs import DECLARATIONS, EVERYTHING, refuse


@pytest.mark.parametrize("declaration", list(DECLARATIONS))
def test_standard_covers_all_pairs_that_are_not_forbidden(declaration: str) -> None:
    capabilities = DECLARATIONS[declaration]
    plan = make_plan(Kernel("none", refuse, capabilities=capabilities), "standard")
    every = all_combinations(capabilities, 2)
    for dtype in capabilities.dtypes:
        covered = set()
        for case in plan.cases:
            if case.spec.dtype == dtype:
                assert is_legal(case.spec, capabilities), case.spec
                covered |= combinations_of(choices_of(case.spec, capabilities), 2)
        assert covered <= every
        assert len(every - covered) <= plan.forbidden, sorted(map(sorted, every - covered))[:5]
    if declaration == "everything":
        assert plan.forbidden == 0


def test_what_counts_as_forbidden_is_forbidden() -> None:
    """No legal problem holds a pair that the covering gave up, however often one is drawn."""
    capabilities = DECLARATIONS["little"]
    covering = Covering.of(capabilities, 2)
    rng = random.Random(3)
    while covering.next_spec(rng, "bf16", "normal") is not None:
        pass
    for pair, _ in itertools.product(covering.forbidden, range(100)):
        spec = build(rng, capabilities, dict(pair), "bf16", "normal")
        assert spec is None or not is_legal(spec, capabilities) or not pair <= choices_of(spec, capabilities)


def test_a_pair_is_not_given_up_because_its_best_company_is_forbidden() -> None:
    """Of torch's flash back end only causality with a scale that is not positive is; in every dtype."""
    capabilities = load("torch.sdpa.flash").capabilities
    expected = {frozenset({("causal", "top_left"), ("scale", value)}) for value in ("0", "-0.125")}
    for seed in range(6):
        covering = Covering.of(capabilities, 2)
        rng = random.Random(seed)
        while covering.next_spec(rng, "bf16", "normal") is not None:
            pass
        assert covering.forbidden == expected


def test_choices_read_back_what_was_built() -> None:
    rng = random.Random(5)
    for _ in range(40):
        row = {name: rng.choice(values) for name, values in factors(EVERYTHING).items()}
        spec = build(rng, EVERYTHING, row, "bf16", "normal")
        assert spec is not None
        assert choices_of(spec, EVERYTHING) == frozenset(row.items()), spec


@pytest.mark.parametrize("level", ["quick", "standard"])
def test_every_check_has_problems(level: str) -> None:
    plan = make_plan(Kernel("none", refuse, capabilities=EVERYTHING), level)
    for dtype in EVERYTHING.dtypes:
        made = Counter(n for case in plan.cases if case.spec.dtype == dtype for n in case.checks)
        expected = {n for n, c in CHECKS.items() if not c.grouped}
        if dtype != EVERYTHING.dtypes[0]:
            expected -= set(ONCE)
        assert expected <= set(made)


def test_reruns_are_registered_checks() -> None:
    assert {*EVERY, *ONCE, *ALTERNATE} <= set(CHECKS)
    costly = {name for name, check in CHECKS.items() if check.reruns}
    assert costly <= {*EVERY, *ONCE, *ALTERNATE}


@pytest.mark.parametrize("option", ["window", "mask", "key_lengths", "cu_seqlens", "causal"])
def test_the_problem_that_is_there_for_an_option_feels_it(option: str) -> None:
    """Taking the option out of the problem shows more keys: otherwise it would count and test nothing."""
    kernel = load("emulator.flash.bf16")
    plan = make_plan(kernel, "quick")
    cases = [c for c in plan.cases if c.reason == f"option {option}" or c.reason.startswith(f"{option}=")]
    assert cases
    for case in cases:
        problem = case.spec.build()
        names = ("cu_seqlens_q", "cu_seqlens_k") if option == "cu_seqlens" else (option,)
        without = problem.replaced(**dict.fromkeys(names))
        assert int(without.visible().sum()) > int(problem.visible().sum())


def test_a_window_as_wide_as_the_problem_covers_nothing() -> None:
    spec = ProblemSpec(dtype="bf16", num_queries=2, num_keys=4, window=(17, 5))
    assert "option window" not in covered(spec, spec.build())
    narrow = replace(spec, window=(0, 1), num_queries=4)
    assert "option window" in covered(narrow, narrow.build())


NOTHING = {
    "zero keys",
    "zero queries",
    "packed sequence without keys",
    "packed sequence without queries",
    "key length 0",
}


def test_lengths_of_zero_are_owed_where_they_are_declared() -> None:
    assert set(required(EVERYTHING)) >= NOTHING
    kept = {"packed sequence without queries"}
    assert NOTHING & set(required(replace(EVERYTHING, zero_length=False, empty_rows=False))) == kept
    assert not NOTHING & set(required(replace(EVERYTHING, cross_lengths=False, empty_rows=False)))
    unpacked = replace(EVERYTHING, options=("key_lengths",), causal=())
    assert NOTHING & set(required(unpacked)) == {"zero keys", "zero queries", "key length 0"}


@pytest.mark.parametrize("label", sorted(NOTHING))
def test_problems_of_nothing_hold_it_and_meet_the_checks_of_memory(label: str) -> None:
    plan = make_plan(Kernel("none", refuse, capabilities=EVERYTHING), "quick")
    cases = [case for case in plan.cases if case.reason == label]
    assert {case.spec.dtype for case in cases} == set(EVERYTHING.dtypes)
    for case in cases:
        assert label in covered(case.spec, case.spec.outline())
        assert set(ON_NOTHING) <= set(case.checks)
        assert EVERYTHING.refuses(case.spec.outline()) is None
        assert lacks(case.spec)


def test_a_kernel_without_zero_lengths_refuses_both() -> None:
    for lengths in ((0, 5), (5, 0), (0, 0)):
        spec = ProblemSpec(dtype="bf16", num_queries=lengths[0], num_keys=lengths[1])
        assert EVERYTHING.refuses(spec.outline()) is None
        assert replace(EVERYTHING, zero_length=False).refuses(spec.outline()) is not None


def test_a_kernel_that_takes_no_single_key_gets_none() -> None:
    kernel = load("emulator.flash.bf16")
    kernel = replace(kernel, capabilities=replace(kernel.capabilities, fewest_keys=2))
    assert "one query, one key" not in required(kernel.capabilities)
    plan = make_plan(kernel, "standard")
    assert min(case.spec.num_keys for case in plan.cases if case.spec.num_keys) == 2
    assert not any(plan.unplanned.values())
    assert kernel.capabilities.refuses(ProblemSpec(dtype="bf16", num_keys=1).outline()) is not None


def test_keys_are_read_off_wide_values_first() -> None:
    """One run tells as many keys as V has columns."""
    narrow = ProblemSpec(num_queries=33, num_keys=127, head_dim=16, value_dim=1)
    wide = ProblemSpec(num_queries=33, num_keys=127, head_dim=16, value_dim=64)
    for specs, expected in (((narrow, wide), 1), ((wide, narrow), 0)):
        chosen = assigned(specs, first_dtype=False)
        assert [i for i, names in enumerate(chosen) if "influence.forward" in names] == [expected]


@pytest.mark.parametrize(("keys", "queries"), [(64, 64), (32, 64), (64, 32), (128, 64), (48, 80)])
def test_a_window_hides_a_visited_tile_from_later_rows_of_a_query_tile(keys: int, queries: int) -> None:
    kernel = replace(
        emulator.KERNELS["emulator.flash.bf16"](),
        arithmetic=lambda _: replace(flash(BF16), block_keys=keys, block_queries=queries),
    )
    plan = make_plan(kernel, "standard", max_cases=60)
    chosen = [case.spec for case in plan.cases if case.reason == "a window that hides a visited tile"]
    assert chosen
    problem = chosen[0].build()
    row = -(-keys // queries) * queries  # the first of a query tile
    first_key = row - problem.window[0]
    end_of_tile = (first_key // keys + 1) * keys
    assert 0 <= first_key < end_of_tile
    assert problem.num_queries > row + 1
    assert all(later - problem.window[0] >= end_of_tile for later in range(row + 1, problem.num_queries))


@pytest.mark.parametrize("level", ["standard", "thorough"])
def test_windows_open_to_one_side_meet_lengths_far_apart(level: str) -> None:
    """FlashAttention-2 puts the number of keys in the place of no limit (finding 016): the plan shows it."""
    kernel = emulator.KERNELS["emulator.flash.bf16"]()
    specs = [case.spec for case in make_plan(kernel, level, max_cases=90).cases if "window (" in case.reason]
    assert {spec.window for spec in specs} == {(2, None), (None, 2)}
    for spec in specs:
        problem = spec.build()
        assert problem.window == spec.window
        if spec.window == (2, None):
            limited = problem.replaced(window=(2, problem.num_keys))
            assert not bool((limited.visible() == problem.visible()).all())


def test_a_number_in_the_place_of_no_limit_is_rejected_at_standard() -> None:
    kernel = emulator.KERNELS["emulator.flash.bf16"]()

    def forward(problem: Problem) -> ForwardResult:
        left, right = problem.window or (None, None)
        if left is not None and right is None:
            problem = problem.replaced(window=(left, problem.num_keys))
        return kernel.forward(problem)

    faulty = replace(kernel, forward=forward, backward=None)
    for case in make_plan(faulty, "standard", max_cases=90).cases:
        if "window (2, None)" in case.reason:
            assert CHECKS["forward.bound"](faulty, case.spec.build()).failed
            return
    raise AssertionError("the plan holds no such window")
