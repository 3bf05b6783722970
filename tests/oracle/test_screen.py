"""The screen is coarser than the proof everywhere, and fine enough to spare ordinary rows."""

from __future__ import annotations

import pytest
import torch

from flashcheck.oracle import fp64, own_error, screen
from flashcheck.oracle.operands import operands
from flashcheck.oracle.parts import finite_rows
from flashcheck.oracle.unit import FP64
from flashcheck.problem import Problem
from tests.oracle.problems import random_problem

SPREADS = (1.0, 2.0**-30, 2.0**10, 2.0**40)


def problems() -> list[Problem]:
    found = [random_problem(seed, spread=SPREADS[seed % 4]) for seed in range(120)]
    finite = [p for p in found if bool(finite_rows(p, operands(p)).all())]
    assert len(finite) > 80
    return finite


def test_forward_never_claims_less_than_the_proof() -> None:
    claimed = 0
    for problem in problems():
        low = fp64.forward(problem)
        proof = own_error.forward_error(problem, low, FP64)
        out, lse = screen.forward_error(problem, low)
        assert bool((out >= proof.out).all()), problem.describe()
        assert bool((lse >= proof.lse).all()), problem.describe()
        claimed += int(torch.isfinite(out).all())
    assert claimed > 50


@pytest.mark.parametrize("conditional", [False, True])
def test_backward_never_claims_less_than_the_proof(conditional: bool) -> None:
    claimed = 0
    for problem in problems():
        low = fp64.forward(problem)
        given = {"out": low.out, "lse": low.lse.float()} if conditional else {}
        got = fp64.backward(problem, **given)
        proof = own_error.backward_error(problem, low, got, FP64, **given)
        errors = screen.backward_error(problem, low, got, **given)
        for name, error in errors.items():
            assert bool((error >= getattr(proof, name)).all()), (name, problem.describe())
            assert not bool(torch.isnan(error).any())
        claimed += all(bool(torch.isfinite(error).all()) for error in errors.values())
    assert claimed > 40


def test_ordinary_problems_pass_with_room_to_spare() -> None:
    gen = torch.Generator().manual_seed(0)
    q, k, v, dout = (torch.randn(1, 2, 64, 64, generator=gen).bfloat16() for _ in range(4))
    problem = Problem(q=q, k=k, v=v, dout=dout)
    low = fp64.forward(problem)
    out, lse = screen.forward_error(problem, low)
    assert float(out.max()) < 2.0**-24 / 64
    assert float(lse.max()) < 2.0**-24 / 64
    errors = screen.backward_error(problem, low, fp64.backward(problem))
    assert all(float(error.max()) < 2.0**-20 / 64 for error in errors.values())
