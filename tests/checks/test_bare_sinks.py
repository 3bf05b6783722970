"""Rows that see nothing but a sink: gradients are judged there, but for a gradient of their LSE."""

from __future__ import annotations

import pytest
import torch

from flashcheck.checks import Judged, check_named
from flashcheck.loading import load
from flashcheck.problem import Problem


def problem(seed: int) -> Problem:
    g = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(1, 2, 9, 16, generator=g).bfloat16() for _ in range(3))
    mask = torch.rand(1, 1, 9, 9, generator=g) > 0.5
    mask[..., 4, :] = False
    return Problem(q, k, v, mask=mask, sink=torch.tensor([0.5, -1.0]), seed=seed)


@pytest.mark.parametrize("seed", [1, 2])
def test_an_honest_kernel_passes_and_other_rows_keep_their_gradient_of_the_lse(seed: int) -> None:
    judged = Judged(load("emulator.flash.bf16"), problem(seed))
    for name in ("backward.bound", "backward.own_forward", "backward.end_to_end"):
        assert not check_named(name).on(judged).failed, name
    dlse = judged.gradient_problem.dlse
    assert (dlse is not None) == (seed % 2 == 1)
    if dlse is not None:
        assert (dlse[..., 4] == 0).all()
        assert (dlse[..., :4] != 0).all()
