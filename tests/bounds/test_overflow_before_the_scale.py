"""A sum may leave fp32's range before the scale makes it small again, or 0: 0 * inf is NaN."""

from __future__ import annotations

import pytest
import torch

from flashcheck.bounds.numbers import FP32_MAX
from flashcheck.checks import Judged, check_named
from flashcheck.loading import load
from flashcheck.problem import Problem

SCALES = [0.0, -0.0, 1e-310, 1e-30]


def judged_with(scale: float, growing: str) -> Judged:
    """dP of 2^100 times entries of 2^28, of both signs, in K or in Q; all scores are far from any limit."""
    draw = torch.Generator().manual_seed(0)
    q, k, v, dout = (torch.randn(1, 1, 16, 8, generator=draw) for _ in range(4))
    large = {"k": k, "q": q}[growing]
    large.mul_(2.0**28)
    (q if growing == "k" else k).mul_(2.0**-28)
    problem = Problem(q=q.bfloat16(), k=k.bfloat16(), v=(v * 2.0**100).bfloat16(), scale=scale)
    return Judged(load("emulator.flash.bf16"), problem.replaced(dout=dout.bfloat16()))


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize(("growing", "gradient"), [("k", "dq"), ("q", "dk")])
def test_sums_past_the_range_may_be_anything(scale: float, growing: str, gradient: str) -> None:
    judged = judged_with(scale, growing)
    got = judged.gradients[gradient]
    assert not bool(torch.isfinite(got).all())  # the case is there
    assert float(getattr(judged.exact_gradients, gradient).abs().max()) < FP32_MAX
    for name in ("backward.bound", "backward.algorithm", "backward.own_forward", "backward.end_to_end"):
        record = check_named(name).on(judged)
        assert not record.failed, record.message


@pytest.mark.parametrize("scale", SCALES)
def test_scores_past_the_range_may_be_anything(scale: float) -> None:
    draw = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 1, 16, 8, generator=draw) for _ in range(3))
    problem = Problem(q=(q * 2.0**70).bfloat16(), k=(k * 2.0**70).bfloat16(), v=v.bfloat16(), scale=scale)
    judged = Judged(load("emulator.flash.bf16"), problem)
    assert bool(torch.isnan(judged.result.out).any())
    for name in ("forward.bound", "forward.algorithm", "special.no_silent_overflow"):
        record = check_named(name).on(judged)
        assert not record.failed, record.message
