"""Zeros of either sign are one number: 0 times a hidden value has that value's sign."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from flashcheck.checks import CHECKS, Judged
from flashcheck.kernel import ForwardResult, Kernel
from flashcheck.loading import load
from flashcheck.problem import Problem

DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def _underflowing(dtype: torch.dtype) -> Problem:
    """Causal; every visible product of a weight and a value is negative and rounds to 0."""
    q, k = torch.zeros(1, 1, 8, 16), torch.zeros(1, 1, 8, 16)
    tiny = -torch.finfo(torch.float32).smallest_normal * 2.0**-23  # times less than 1/2 it rounds to -0
    v = torch.full((1, 1, 8, 16), tiny if dtype != torch.float16 else -0.0)
    return Problem(q.to(dtype), k.to(dtype), v.to(dtype), scale=1.0, causal="top_left")


def _without_initial_zero(leak: float = 0.0) -> Kernel:
    """Eager attention whose sum over keys starts at the first product, as some matrix libraries do."""
    honest = load("eager")

    def forward(problem: Problem) -> ForwardResult:
        scores = problem.q.double() @ problem.k.double().mT * problem.effective_scale
        weights = torch.softmax(scores.masked_fill(~problem.visible(), -torch.inf), -1).float()
        total = weights[..., :, :1] * problem.v.float()[..., :1, :]
        for j in range(1, problem.num_keys):
            total = total + weights[..., :, j : j + 1] * problem.v.float()[..., j : j + 1, :]
        return ForwardResult((total + leak * problem.v[..., -1:, :].float()).to(problem.q.dtype))

    return replace(honest, forward=forward, backward=None)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_sign_of_a_zero_may_follow_hidden_values(dtype: torch.dtype) -> None:
    problem, kernel = _underflowing(dtype), _without_initial_zero()
    other = problem.replaced(v=problem.v.clone())
    other.v[..., 4:, :] = 1.0
    one, two = (kernel.forward(x).out[:, :, 2:4] for x in (problem, other))
    assert bool((torch.signbit(one) & ~torch.signbit(two)).any()), "the input does not show what it is for"
    assert CHECKS["bitwise.suffix"].on(Judged(kernel, problem)).status == "pass"


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_hidden_value_that_shows_is_still_seen(dtype: torch.dtype) -> None:
    kernel = _without_initial_zero(leak=2.0**-6)
    assert CHECKS["bitwise.suffix"].on(Judged(kernel, _underflowing(dtype))).failed
