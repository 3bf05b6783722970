"""Hidden scores past the format of the scores: no promise is broken, and leaks elsewhere are still seen."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from flashcheck.checks import CHECKS, Judged
from flashcheck.kernel import ForwardResult
from flashcheck.loading import load
from flashcheck.problem import Problem


def _problem(size: float, dtype: torch.dtype) -> Problem:
    """Causal; scores of the last key are about ``size``, others of order 1."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn((1, 2, 9, 16), generator=generator) for _ in range(3))
    q[..., 0] = 4.0
    k[:, :, -1, 0] = size / 4
    return Problem(q.to(dtype), k.to(dtype), v.to(dtype), scale=1.0, causal="top_left")


@pytest.mark.parametrize(("size", "status"), [(1.0, "pass"), (1e5, "not applicable")])
def test_an_additive_mask_owes_nothing_where_hidden_scores_overflow(size: float, status: str) -> None:
    problem = _problem(size, torch.float16)
    assert CHECKS["bitwise.suffix"].on(Judged(load("eager"), problem)).status == status


def test_a_leak_is_seen_in_rows_whose_scores_stay_inside() -> None:
    honest = load("eager")

    def leaking(problem: Problem) -> ForwardResult:
        seen = honest.forward(problem)
        return replace(seen, out=seen.out + problem.v[:, :, -1:] * 2**-6)

    problem = _problem(1.0, torch.float16)
    assert CHECKS["bitwise.suffix"].on(Judged(replace(honest, forward=leaking), problem)).failed


def test_bf16_scores_keep_the_range_of_fp32() -> None:
    problem = _problem(1e5, torch.bfloat16)
    assert CHECKS["bitwise.suffix"].on(Judged(load("eager"), problem)).status == "pass"
