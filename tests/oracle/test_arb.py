"""mpmath against arb: two libraries, two statements of the formulas, equal in every certified digit."""

from __future__ import annotations

from typing import Any

import pytest

from flashcheck.oracle import exact, fp64, own_error, unit
from flashcheck.problem import Problem
from tests.oracle.problems import random_problem

pytest.importorskip("flint")
from flashcheck.oracle import arb

BITS = 200


def check(balls: Any, values: Any, slack: Any, name: str) -> None:
    """Every mpf lies in its ball, widened by mpmath's own proved error."""
    if isinstance(balls, list):
        assert len(balls) == len(values) == len(slack), name
        for ball, value, error in zip(balls, values, slack, strict=True):
            check(ball, value, error, name)
    elif balls.is_finite():
        assert arb.contains(balls, values, slack), (name, balls, values, slack)
        assert float(balls.rad()) <= 2.0**-100 * (1 + abs(float(balls.mid()))), (name, balls)
    else:
        assert float(values) == float("-inf"), name


def problems() -> list[Problem]:
    found = [random_problem(seed, max_length=5, spread=(1.0, 2.0**20)[seed % 2]) for seed in range(40)]
    finite = [p for p in found if bool(p.q.double().isfinite().all())]  # fp16 and fp8 may overflow
    return [p for p in finite if p.num_queries and p.num_keys]


@pytest.mark.parametrize("problem", problems(), ids=lambda p: str(p.seed))
def test_forward(problem: Problem) -> None:
    balls = arb.forward(problem, bits=BITS)
    heads = [
        [exact.forward(problem, b, h, bits=BITS) for h in range(problem.num_heads)]
        for b in range(problem.batch)
    ]
    rounded = exact.forward_all(problem, bits=BITS)
    error = own_error.forward_error(problem, rounded, unit.multiprecision(BITS))
    for name in ("out", "lse", "probabilities"):
        values = [[getattr(head, name) for head in batch] for batch in heads]
        check(getattr(balls, name), values, getattr(error, name).tolist(), name)


@pytest.mark.parametrize("conditional", [False, True])
@pytest.mark.parametrize("problem", problems()[:20], ids=lambda p: str(p.seed))
def test_backward(problem: Problem, conditional: bool) -> None:
    full = fp64.forward(problem)
    given = {"out": full.out, "lse": full.lse.float()} if conditional else {}
    balls = arb.backward(problem, bits=BITS, **given)  # type: ignore[arg-type]
    got = exact.backward(problem, bits=BITS, **given)  # type: ignore[arg-type]
    error = own_error.backward_error(
        problem,
        exact.forward_all(problem, bits=BITS),
        got.rounded(problem),
        unit.multiprecision(BITS),
        **given,  # type: ignore[arg-type]
    )
    for name in ("dq", "dk", "dv", "dbias", "dsink", "dscale"):
        if getattr(got, name) is not None:
            check(getattr(balls, name), getattr(got, name), getattr(error, name).tolist(), name)


def test_a_wrong_digit_is_noticed() -> None:
    problem = problems()[0]
    balls = arb.forward(problem, bits=BITS)
    row = exact.forward(problem, 0, 0, [0], bits=BITS)
    value = row.out[0][0]
    assert arb.contains(balls.out[0][0][0][0], value, 2.0**-170)
    assert not arb.contains(balls.out[0][0][0][0], value * (1 + value.context.mpf(2) ** -150), 2.0**-170)
