"""Rows that are copies of each other are one observation, not a thousand that agree."""

from __future__ import annotations

import torch

from flashcheck.checks import Judged, check_named
from flashcheck.checks.record import Status
from flashcheck.loading import load
from flashcheck.mutants import MUTANTS, control
from flashcheck.problem import Problem


def test_copies_of_one_key_give_no_verdict_on_its_gradients() -> None:
    """The problem that exposes a narrow accumulator repeats one key 256 times; the control passes on it."""
    problem = MUTANTS["accumulator-fp16"].expose()[-1]
    assert check_named("backward.bias").on(Judged(control(), problem)).status is not Status.FAIL


def test_keys_of_their_own_are_judged_and_an_honest_kernel_passes() -> None:
    g = torch.Generator().manual_seed(5)
    q, dout = (torch.randn(1, 2, 40, 32, generator=g).bfloat16() for _ in range(2))
    k, v = (torch.randn(1, 2, 256, 32, generator=g).bfloat16() for _ in range(2))
    judged = Judged(load("emulator.flash.bf16"), Problem(q, k, v, dout=dout))
    assert check_named("backward.bias").on(judged).status is Status.PASS
