"""Specs rebuild exactly from JSON; the generator and the strategies stay inside what is declared."""

from __future__ import annotations

import json
import random

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flashcheck.errors import UnknownNameError
from flashcheck.inputs.buffers import LAYOUTS, hosted
from flashcheck.inputs.coverage import covered, required
from flashcheck.inputs.problems import Wishes, draw_spec
from flashcheck.inputs.spec import MASK_KINDS, ProblemSpec
from flashcheck.inputs.strategies import specs
from flashcheck.kernel import Capabilities, ForwardResult, Kernel
from flashcheck.plan import make_plan
from flashcheck.problem import OPTIONS, Problem

EVERYTHING = Capabilities(
    dtypes=("fp16", "bf16", "fp32", "e4m3"),
    options=OPTIONS,
    causal=("top_left", "bottom_right"),
    value_dim_differs=True,
    gqa=True,
    lse=True,
    empty_rows=True,
    zero_length=True,
)
LITTLE = Capabilities(options=("causal",), causal=("bottom_right",), head_dim=(16, 64), head_dim_multiple=16)
SQUARE = Capabilities(options=(), cross_lengths=False)
DECLARATIONS = {"everything": EVERYTHING, "little": LITTLE, "square": SQUARE}


def refuse(problem: Problem) -> ForwardResult:
    """Plans are made without running the kernel."""
    raise AssertionError(problem.describe())


def same(a: Problem, b: Problem) -> bool:
    for name in ("q", "k", "v", "mask", "bias", "sink", "alibi_slopes", "key_lengths", "cu_seqlens_q"):
        x, y = getattr(a, name), getattr(b, name)
        if (x is None) != (y is None):
            return False
        if x is not None and not torch.equal(x.to(torch.float64), y.to(torch.float64)):
            return False
    return a.describe() == b.describe()


@pytest.mark.parametrize("declaration", list(DECLARATIONS))
def test_drawn_specs_are_declared_and_survive_json(declaration: str) -> None:
    capabilities = DECLARATIONS[declaration]
    rng = random.Random(0)
    for seed in range(60):
        spec = draw_spec(rng, capabilities, capabilities.dtypes[seed % len(capabilities.dtypes)], seed)
        problem = spec.build()
        assert capabilities.refuses(problem) is None, spec
        assert capabilities.empty_rows or not spec.leaves_rows(), spec
        again = ProblemSpec.from_json(json.loads(json.dumps(spec.to_json())))
        assert again == spec
        assert same(again.build(), problem)


def test_unknown_fields_are_named() -> None:
    with pytest.raises(UnknownNameError, match="did you mean num_keys"):
        ProblemSpec.from_json({"num_key": 3})
    with pytest.raises(UnknownNameError, match="holes"):
        ProblemSpec(mask="hole").build()


def test_mask_kinds_leave_rows_as_their_names_say() -> None:
    for kind in MASK_KINDS:
        spec = ProblemSpec(num_heads=3, num_kv_heads=3, num_queries=30, num_keys=20, mask=kind)
        assert spec.leaves_rows() == (kind == "holes"), kind


@pytest.mark.parametrize("declaration", list(DECLARATIONS))
def test_every_plan_covers_what_is_owed(declaration: str) -> None:
    capabilities = DECLARATIONS[declaration]
    plan = make_plan(Kernel("none", refuse, capabilities=capabilities), "quick")
    assert plan.unplanned == {}
    for dtype in capabilities.dtypes:
        seen: set[str] = set()
        for case in plan.cases:
            if case.spec.dtype == dtype:
                seen |= covered(case.spec, case.spec.outline())
        assert set(required(capabilities)) <= seen


def test_plans_are_deterministic_and_follow_the_seed() -> None:
    kernel = Kernel("none", refuse, capabilities=EVERYTHING)
    assert make_plan(kernel) == make_plan(kernel)
    assert make_plan(kernel, seed=1) != make_plan(kernel, seed=2)
    assert len(make_plan(kernel, max_cases=7).cases) == 7 * len(EVERYTHING.dtypes)


@pytest.mark.parametrize("declaration", list(DECLARATIONS))
def test_strategies_draw_declared_problems(declaration: str) -> None:
    capabilities = DECLARATIONS[declaration]

    @settings(max_examples=25, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(st.data())
    def run(data: st.DataObject) -> None:
        spec = data.draw(specs(capabilities, capabilities.dtypes[0]))
        assert capabilities.refuses(spec.build()) is None

    run()


def test_strategies_shrink_to_the_smallest_spec_with_the_property() -> None:
    from hypothesis import find

    found = find(
        specs(EVERYTHING, "fp32"),
        lambda spec: spec.num_keys > 33 and spec.causal == "bottom_right",
        settings=settings(max_examples=300, deadline=None, database=None),
    )
    assert found.num_keys <= 47  # the smallest listed length past 33
    assert (found.num_queries, found.head_dim, found.batch, found.num_heads) == (16, 16, 1, 1)
    assert (found.mask, found.bias, found.family, found.seed) == (None, False, "normal", 0)


@pytest.mark.parametrize("layout", list(LAYOUTS))
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "e4m3"])
def test_buffers_hold_the_values_and_notice_writes(layout: str, dtype: str) -> None:
    problem = ProblemSpec(dtype=dtype, batch=2, num_heads=2, num_kv_heads=2, num_queries=5).build()
    moved, hosts = hosted(problem, layout)
    for host in hosts.values():
        host.poison(torch.nan)
    for name in "qkv":
        assert torch.equal(getattr(moved, name).double(), getattr(problem, name).double())
    host = hosts["k"]
    assert host.allocation.numel() > host.view.numel()
    before = host.snapshot()
    assert torch.equal(host.snapshot(), before)
    host.allocation.view(-1)[0 if layout == "guarded" else -1] = 1.0
    assert not torch.equal(host.snapshot(), before)


@pytest.mark.parametrize("side", ["smaller", "larger"])
def test_the_dim_of_v_lies_to_the_side_asked_for(side: str) -> None:
    """A kernel may take one width for the other: only a larger one shows what is left out."""
    rng = random.Random(0)
    for _ in range(50):
        spec = draw_spec(rng, EVERYTHING, "bf16", 0, Wishes(value_dim=side))  # type: ignore[arg-type]
        assert spec.value_dim < spec.head_dim if side == "smaller" else spec.value_dim > spec.head_dim
        assert f"value dim {side}" in covered(spec, spec.outline())
