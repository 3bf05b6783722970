"""Powers of two commute with the roundings of every preset, whatever its units do with subnormal operands."""

from __future__ import annotations

from dataclasses import replace

import pytest

from flashcheck import emulator
from flashcheck.checks import CHECKS, Judged
from flashcheck.inputs.spec import ProblemSpec
from flashcheck.kernel import ForwardResult
from flashcheck.loading import load
from flashcheck.problem import Problem

SPEC = ProblemSpec(
    num_heads=2, num_queries=33, num_keys=31, value_dim=128, scale=1.0, causal="top_left", seed=1
)


def _problem(dtype: str, size: float) -> Problem:
    """Values around ``size`` times the smallest normal number of the dtype; q and k of order 1."""
    problem = replace(SPEC, dtype=dtype).build()
    smallest = 2.0**problem.format.min_exponent
    if smallest < 2.0**-100:
        return problem  # no sum of such values is above what the check judges
    return problem.replaced(v=(problem.v.double() * smallest * size).to(problem.v.dtype))


@pytest.mark.parametrize("size", [1.0, 30.0])
@pytest.mark.parametrize("name", list(emulator.KERNELS))
def test_every_preset_keeps_the_relation_among_small_operands(name: str, size: float) -> None:
    kernel = load(name)
    for dtype in kernel.capabilities.dtypes:
        record = CHECKS["bitwise.scaling"].on(Judged(kernel, _problem(dtype, size)))
        assert not record.failed, record.message


@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32"])
@pytest.mark.parametrize("tensor", ["v", "k"])
def test_an_absolute_error_is_still_seen(dtype: str, tensor: str) -> None:
    honest = load("eager")

    def forward(problem: Problem) -> ForwardResult:
        changed = getattr(problem, tensor)
        return honest.forward(problem.replaced(**{tensor: changed + 2.0**-6}))

    kernel = replace(honest, forward=forward, backward=None)
    record = CHECKS["bitwise.scaling"].on(Judged(kernel, replace(SPEC, dtype=dtype, family="normal").build()))
    assert record.failed


@pytest.mark.parametrize("dtype", ["fp16", "e4m3", "e5m2"])
def test_units_that_align_do_not_double_subnormal_values(dtype: str) -> None:
    kernel, problem = load(f"emulator.hopper.flash.{dtype}"), _problem(dtype, 1.0)
    doubled = problem.replaced(v=(problem.v.double() * 2).to(problem.v.dtype))
    one, two = (kernel.forward(p).out.double() for p in (problem, doubled))
    assert bool((2 * one != two).any()), "the presets above are not asked what the relation leaves out"
