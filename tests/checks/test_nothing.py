"""Problems without queries, without keys, or with such a sequence: honest kernels pass every check, and a
kernel that leaves early does not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from flashcheck.checks import CHECKS, Judged, check_named
from flashcheck.inputs.spec import ProblemSpec
from flashcheck.kernel import ForwardResult, Kernel
from flashcheck.loading import load
from flashcheck.mutants import control
from flashcheck.problem import Problem

LENGTHS = [(0, 17), (17, 0), (0, 0)]
OPTIONS: list[dict[str, Any]] = [
    {},
    {"causal": "bottom_right", "window": (3, 0)},
    {"bias": True},
    {"bias": True, "sink": True, "alibi": True},
    {"mask": "random", "softcap": 2.0},
]
SEGMENTS = [((9, 0), (0, 0), (8, 21)), ((0, 9), (17, 12)), ((17, 0), (0, 21)), ((0, 0), (17, 21))]


def nothing(dtype: str, lengths: tuple[int, int], **options: Any) -> ProblemSpec:
    return ProblemSpec(
        dtype=dtype,
        num_heads=4,
        num_kv_heads=2,
        num_queries=lengths[0],
        num_keys=lengths[1],
        seed=3,
        **options,
    )


def failures(kernel: Kernel, problem: Problem) -> list[tuple[str, str]]:
    judged = Judged(kernel, problem)
    records = [check.on(judged) for name, check in CHECKS.items() if name != "state.fresh_process"]
    return [(record.check, record.message) for record in records if record.failed]


HONEST = [
    "control",
    "emulator.flash.bf16",
    "emulator.eager.fp32",
    "emulator.hopper.flash.e4m3",
    "torch.sdpa.math",
]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: "+".join(o) or "plain")
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("name", HONEST)
def test_honest_kernels_pass_without_queries_or_keys(
    name: str, lengths: tuple[int, int], options: dict[str, Any]
) -> None:
    kernel = control() if name == "control" else load(name)
    problem = nothing(kernel.capabilities.dtypes[0], lengths, **options).build()
    if kernel.capabilities.refuses(problem) is None:
        assert failures(kernel, problem) == []


@pytest.mark.parametrize("segments", SEGMENTS, ids=str)
@pytest.mark.parametrize("name", HONEST[:3])
def test_honest_kernels_pass_with_sequences_of_length_0(
    name: str, segments: tuple[tuple[int, int], ...]
) -> None:
    kernel = control() if name == "control" else load(name)
    problem = nothing(kernel.capabilities.dtypes[0], (17, 21), segments=segments).build()
    assert failures(kernel, problem) == []


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_the_kernels_of_this_repository_pass(lengths: tuple[int, int]) -> None:
    for name in ("kernels:flash_attention", "kernels:flash_decode"):
        assert failures(load(name), nothing("bf16", lengths).build()) == []


def early(problem: Problem) -> ForwardResult:
    """Leaves without writing where there are no keys."""
    honest = control()
    if problem.num_keys:
        return honest.forward(problem)
    shape = (problem.batch, problem.num_heads, problem.num_queries, problem.value_dim)
    return ForwardResult(torch.empty(shape, dtype=problem.q.dtype), torch.full(shape[:3], -torch.inf))


def skipping(problem: Problem) -> ForwardResult:
    """Writes no row of a packed sequence without keys."""
    result = control().forward(problem)
    assert problem.cu_seqlens_q is not None
    out = torch.empty(result.out.shape, dtype=result.out.dtype)
    seen = problem.visible().any(-1, keepdim=True)
    return ForwardResult(torch.where(seen, result.out, out), result.lse)


def test_outputs_that_are_never_written_fail() -> None:
    check = check_named("isolation.unwritten")
    honest = control()
    assert check(replace(honest, forward=early), nothing("bf16", (17, 0)).build()).failed
    packed = nothing("bf16", (17, 21), segments=SEGMENTS[0]).build()
    assert check(replace(honest, forward=skipping), packed).failed


def test_gradients_that_are_never_written_fail() -> None:
    honest = control()

    def backward(problem: Problem, out: Tensor, lse: Tensor) -> Mapping[str, Tensor]:
        assert honest.backward is not None
        got = honest.backward(problem, out, lse)
        if problem.num_queries:
            return got
        return {**got, "dv": torch.empty(problem.v.shape, dtype=problem.v.dtype)}

    subject = replace(honest, backward=backward)
    problem = nothing("bf16", (0, 17)).build()
    assert check_named("isolation.gradients_unwritten")(subject, problem).failed


def test_what_the_judge_allocates_is_not_taken_for_the_kernels():
    """A kernel that leaves no allocation uninitialised has nothing to be judged on."""
    honest = control()

    def zeros(problem: Problem, *_: Tensor) -> Mapping[str, Tensor]:
        return {n: torch.zeros(getattr(problem, n[1:]).shape) for n in ("dq", "dk", "dv")}

    subject = replace(honest, backward=zeros)
    record = check_named("isolation.gradients_unwritten")(subject, nothing("bf16", (0, 17)).build())
    assert record.status == "not applicable", record
