"""An eager row whose scores leave their format is NaN in all columns: hidden keys get NaN gradients too."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from flashcheck.checks import Judged, check_named
from flashcheck.inputs.spec import ProblemSpec
from flashcheck.loading import load
from flashcheck.problem import Problem

SPEC = ProblemSpec(
    dtype="fp16",
    num_heads=2,
    num_kv_heads=2,
    num_queries=48,
    num_keys=7,
    head_dim=128,
    value_dim=128,
    scale=-0.125,
    mask="first_key",
    family="very_negative",
    seed=1550355988,
)


@pytest.mark.parametrize("mask", ["first_key", "keys", "random"])
def test_hidden_keys_of_rows_that_overflow_may_have_any_gradient_but_a_finite_wrong_one(mask: str) -> None:
    judged = Judged(load("eager"), replace(SPEC, mask=mask).build())
    assert bool(torch.isnan(judged.gradients["dk"]).any())  # the case is there
    for name in ("forward.bound", "backward.bound", "backward.algorithm"):
        assert not check_named(name).on(judged).failed
    wrong = {**judged.gradients, "dk": torch.full_like(judged.gradients["dk"], 9.0)}
    interval = judged.backward_bound.tensors["dk"].interval
    hidden = ~judged.exact.visible.any(-2)
    assert bool((~interval.accepts(wrong["dk"])[hidden]).all())


def test_a_log_sum_exp_that_is_off_by_hundreds_leaves_any_probability() -> None:
    """The exact P is up to e^709 there, a float64 number, and an error of e^700 is less than that."""
    spec = ProblemSpec(
        num_heads=6,
        num_kv_heads=3,
        num_queries=86,
        num_keys=39,
        head_dim=8,
        value_dim=8,
        scale=-0.125,
        mask="random",
        bias="bq",
        family="extreme_logits",
        gradient="huge",
        seed=2507,
    )
    judged = Judged(load("emulator.flash.fp32"), spec.build())
    assert float(judged.exact_gradients.dv.nan_to_num(0.0).abs().max()) > 1e305  # the case is there
    for name in ("backward.bound", "backward.own_forward", "backward.end_to_end"):
        assert not check_named(name).on(judged).failed


def test_a_capped_ds_may_pass_fp32_on_its_way_through_the_derivative() -> None:
    """c tanh(x / c) differentiated step by step multiplies dS by c and divides it again: inf * 0 is NaN."""
    v = torch.tensor([0.0, -1.7e38]).view(1, 1, 2, 1)
    q, dout = torch.zeros(1, 1, 1, 1), torch.ones(1, 1, 1, 1)
    p = Problem(q, torch.zeros(1, 1, 2, 1), v, scale=1.0, softcap=50.0, dout=dout)
    judged = Judged(load("torch.flex.eager"), p)
    assert bool(judged.gradients["dq"].isnan().all())  # the case is there
    assert not check_named("backward.bound").on(judged).failed
    interval = judged.backward_bound.tensors["dq"].interval
    assert not bool(interval.accepts(torch.ones_like(judged.gradients["dq"])).any())
