"""Checks that do not trust the oracle: faults that oracle and kernel share, and state of a process.

A shared fault is staged by telling a judged problem that its accuracy was fine.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from torch import Tensor

from flashcheck.checks import Judged, check_named
from flashcheck.inputs.spec import ProblemSpec
from flashcheck.kernel import Kernel
from flashcheck.loading import load
from flashcheck.mutants import control, mutant_named
from flashcheck.problem import Problem

SPEC = ProblemSpec(dtype="bf16", num_heads=4, num_kv_heads=2, num_queries=20, num_keys=37, causal="top_left")


def trusted(kernel: Kernel, problem: Problem) -> Judged:
    """Judged as if the oracle made the kernel's mistake too."""
    judged = Judged(kernel, problem)
    judged.__dict__ |= {"measured": {}, "measured_gradients": {}}
    return judged


@pytest.mark.parametrize("tensor", ["dq", "dk", "dv"])
def test_gradient_sums_reject_a_gradient_that_is_a_factor_off(tensor: str) -> None:
    honest = control()
    assert honest.backward is not None

    def backward(problem: Problem, out: Tensor, lse: Tensor) -> Mapping[str, Tensor]:
        assert honest.backward is not None
        got = dict(honest.backward(problem, out, lse))
        return {**got, tensor: (got[tensor].float() * 1.25).to(got[tensor].dtype)}

    check = check_named("relation.gradient_sums")
    problem = replace(SPEC, dtype="fp32").build()  # in 16 bits the bounds of a whole sum hide a factor
    assert check.on(trusted(replace(honest, backward=backward), problem)).failed
    assert check.on(trusted(honest, problem)).status == "pass"


def test_score_gradient_rejects_a_backward_without_delta() -> None:
    check = check_named("relation.score_gradient")
    assert check.on(trusted(mutant_named("bwd-no-delta").make(), SPEC.build())).failed
    assert check.on(trusted(control(), SPEC.build())).status == "pass"


@pytest.mark.parametrize(
    ("mutant", "options"),
    [
        ("cap-ignored", dict(softcap=1.0)),
        ("window-right-ignored", dict(causal=None, window=(4, 2))),
        ("sink-ignored", dict(sink=True)),
        ("scale-ignored", dict(scale=1.0)),
    ],
)
def test_option_effect_rejects_an_option_without_effect(mutant: str, options: dict[str, object]) -> None:
    problem = replace(SPEC, **options).build()  # type: ignore[arg-type]
    check = check_named("option.effect")
    assert check.on(trusted(mutant_named(mutant).make(), problem)).failed
    assert check.on(trusted(control(), problem)).status == "pass"


def test_option_effect_says_nothing_where_an_option_changes_nothing() -> None:
    problem = replace(SPEC, causal=None, window=(100, 100)).build()
    assert check_named("option.effect").on(trusted(control(), problem)).status == "not applicable"


COUNTING = """
import torch
calls = 0

def attention(q, k, v, *, is_causal=False, scale=None):
    global calls
    calls += 1
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=is_causal, scale=scale)
    return out + (calls > 1) * 2.0**-20
"""


def test_a_fresh_process_shows_what_earlier_calls_left(tmp_path: Path) -> None:
    path = tmp_path / "counting.py"
    path.write_text(COUNTING)
    kernel = load(f"{path}:attention")
    problem = ProblemSpec(dtype="fp32").build()
    kernel.forward(problem)
    assert check_named("state.fresh_process")(kernel, problem).failed
