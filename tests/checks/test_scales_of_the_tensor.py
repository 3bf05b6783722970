"""Scales taken from a whole tensor couple its rows; no check may take that for a leak, or miss one for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from flashcheck import emulator
from flashcheck.arithmetic import IEEE, flash
from flashcheck.checks import CHECKS, Judged
from flashcheck.formats import BF16, E4M3
from flashcheck.inputs.spec import ProblemSpec
from flashcheck.kernel import ForwardResult, Kernel
from flashcheck.operands import as_multiplied, same_scales
from flashcheck.problem import Problem

DECLARED = emulator.concrete(
    replace(flash(E4M3), output_format=BF16, probability_scale=256.0, input_scale="tensor")
)
COUPLED = ("bitwise.suffix", "bitwise.batch", "relation.split_merge")
SPECS = [
    ProblemSpec(
        dtype="bf16",
        batch=2,
        num_heads=4,
        num_kv_heads=2,
        num_queries=9,
        num_keys=65,
        head_dim=32,
        value_dim=32,
        scale=0.125,
        causal="bottom_right",
        family=family,
        seed=seed,
    )
    for family in ("normal", "format_maxima", "outliers", "spiked")
    for seed in range(3)
]


def _spread(spec: ProblemSpec) -> Problem:
    """The last key of the last head far larger than all others: its scale makes their numbers subnormal."""
    problem = spec.build()
    k, v = problem.k.clone(), problem.v.clone()
    for x in (k, v):
        x[-1, -1, -1] = x.double().abs().amax() * 2.0**10 if spec.family == "normal" else x[-1, -1, -1]
    return problem.replaced(k=k, v=v)


def _kernel(change: Callable[[Problem, ForwardResult], ForwardResult] = lambda _, result: result) -> Kernel:
    def forward(problem: Problem) -> ForwardResult:
        result = emulator.forward(as_multiplied(problem, DECLARED), DECLARED, IEEE)
        return change(problem, result)

    base = emulator.as_kernel(DECLARED, name="scaled by tensor")
    capabilities = replace(base.capabilities, dtypes=("bf16",), isolates_nonfinite=False)
    return replace(base, forward=forward, backward=None, capabilities=capabilities)


def _leak(problem: Problem, result: ForwardResult) -> ForwardResult:
    return replace(result, out=result.out + problem.v[:, :1, -1:, :].to(result.out.dtype) * 2**-4)


@pytest.mark.parametrize("check", COUPLED)
def test_no_false_alarm(check: str) -> None:
    for spec in SPECS:
        record = CHECKS[check].on(Judged(_kernel(), _spread(spec)))
        assert not record.failed, f"{spec}: {record.message}"


def test_leaks_are_still_seen() -> None:
    assert CHECKS["bitwise.suffix"].on(Judged(_kernel(_leak), _spread(SPECS[0]))).failed


def test_the_input_shows_what_it_is_for() -> None:
    problem = _spread(SPECS[0])
    part = problem.replaced(k=problem.k[:1], v=problem.v[:1], q=problem.q[:1])
    assert not same_scales(problem, part, DECLARED)
    assert same_scales(problem, part, replace(DECLARED, input_scale="none"))
    whole, alone = (_kernel().forward(p).out[:1] for p in (problem, part))
    assert not torch.equal(whole, alone)
