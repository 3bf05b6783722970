"""The rungs' claimed errors hold against mpmath, on every option and far outside the ordinary range."""

from __future__ import annotations

import pytest
import torch

from flashcheck.oracle import double_double, exact, fp64, own_error, unit
from flashcheck.oracle.quantities import ForwardQuantities
from flashcheck.problem import Problem
from tests.oracle.compare import DIGITS, excess, halves
from tests.oracle.problems import random_problem

FIELDS = ("out", "lse", "products", "scores", "probabilities")
GRADIENTS = ("dq", "dk", "dv", "dbias", "dsink", "dscale")
# Logits of order 1, 1e3, 1e6, 1e10, 1e15 and 1e25: from harmless to hopeless for float64.
SPREADS = (1.0, 2.0**10, 2.0**20, 2.0**33, 2.0**50, 2.0**83)


def problem_of(seed: int) -> Problem:
    """Magnitudes go round robin; data stays finite because only wide formats are stretched far."""
    spread = SPREADS[seed % len(SPREADS)]
    problem = random_problem(seed)
    narrow = problem.q.dtype not in (torch.float64, torch.float32, torch.bfloat16)
    return random_problem(seed, spread=1.0 if narrow else spread)


def expected_forward(problem: Problem) -> dict[str, object]:
    heads = [
        [exact.forward(problem, b, h, digits=DIGITS) for h in range(problem.num_heads)]
        for b in range(problem.batch)
    ]
    return {name: halves([[getattr(head, name) for head in batch] for batch in heads]) for name in FIELDS}


@pytest.mark.parametrize("seed", range(72))
def test_forward(seed: int) -> None:
    problem = problem_of(seed)
    if 0 in (problem.num_queries, problem.num_keys):
        pytest.skip("nothing is computed")
    expected = expected_forward(problem)
    low, high = fp64.forward(problem), double_double.forward(problem)
    errors = (
        own_error.forward_error(problem, low, unit.FP64),
        own_error.forward_error(problem, high.rounded(), unit.DOUBLE_DOUBLE),
    )
    for got, claimed in zip((low, high), errors, strict=True):
        for name in FIELDS:
            if name == "products":  # hidden pairs carry no claim
                continue
            ratio = excess(getattr(got, name), expected[name], getattr(claimed, name))  # type: ignore[arg-type]
            assert ratio <= 1.0, (type(got).__name__, name, ratio)


def stored(problem: Problem, full: ForwardQuantities) -> dict[str, torch.Tensor]:
    gen = torch.Generator().manual_seed(problem.seed)
    noise = torch.randn(full.out.shape, generator=gen, dtype=torch.float64)
    lse = full.lse + torch.randn(full.lse.shape, generator=gen, dtype=torch.float64) / 8
    return {"out": full.out + noise / 8, "lse": lse}


@pytest.mark.parametrize("output", ["from scratch", "float64", "bf16"])
@pytest.mark.parametrize("seed", range(48))
def test_backward(seed: int, output: str) -> None:
    problem = problem_of(seed)
    if 0 in (problem.num_queries, problem.num_keys):
        pytest.skip("nothing is computed")
    low, high = fp64.forward(problem), double_double.forward(problem)
    given = {} if output == "from scratch" else stored(problem, low)
    if output == "bf16":  # dP - delta is then often exact
        given["out"] = given["out"].bfloat16().double()
    expected = exact.backward(problem, digits=DIGITS, **given)  # type: ignore[arg-type]
    gradients = (fp64.backward(problem, **given), double_double.backward(problem, **given))
    claims = (
        own_error.backward_error(problem, low, gradients[0], unit.FP64, **given),
        own_error.backward_error(
            problem, high.rounded(), gradients[1].rounded(), unit.DOUBLE_DOUBLE, **given
        ),
    )
    for got, claimed in zip(gradients, claims, strict=True):
        for name in GRADIENTS:
            if getattr(got, name) is None:
                continue
            reference = halves(getattr(expected, name))
            ratio = excess(getattr(got, name), reference, getattr(claimed, name))
            assert ratio <= 1.0, (type(got).__name__, name, ratio)


def test_claims_are_tight_on_ordinary_problems() -> None:
    """A claim of inf would pass every test above.

    Values of a few units, at most 7 keys: some tens of roundings of 2^-53 (2^-102 in double-double)
    of magnitudes below 2^4.
    """
    for seed in range(0, 72, 6):
        problem = problem_of(seed)
        if 0 in (problem.num_queries, problem.num_keys):
            continue
        low, high = fp64.forward(problem), double_double.forward(problem).rounded()
        for got, used, limit in ((low, unit.FP64, 2.0**-42), (high, unit.DOUBLE_DOUBLE, 2.0**-90)):
            claimed = own_error.forward_error(problem, got, used)
            assert float(claimed.out.max()) < limit
            assert float(claimed.lse.max()) < limit


def one_key(v: float, out: float, dout: float) -> tuple[Problem, dict[str, torch.Tensor]]:
    def filled(x: float) -> torch.Tensor:
        return torch.full((1, 1, 1, 3), x, dtype=torch.float64)

    problem = Problem(q=filled(0.7), k=filled(1.1), v=filled(v), dout=filled(dout))
    return problem, {"out": filled(out), "lse": torch.full((1, 1, 1), 1.3, dtype=torch.float64)}


@pytest.mark.parametrize("change", ["none", "v with more bits", "wide apart"])
def test_a_difference_of_exact_sums_has_no_error(change: str) -> None:
    """One key, O = V: dQ and dK are 0 and known to be. Not so where sums need more than 53 bits."""
    v, out, dout = {
        "none": (1.75, 1.75, -0.375),
        "v with more bits": (0.7, 0.7, 0.3),
        "wide apart": (1.75, 2.0**60, 1.0),
    }[change]
    problem, given = one_key(v, out, dout)
    got = fp64.backward(problem, **given)
    claimed = own_error.backward_error(problem, fp64.forward(problem), got, unit.FP64, **given)
    assert (float(claimed.dq.max()) < 2.0**-900) is (change == "none")
    assert (float(claimed.dk.max()) < 2.0**-900) is (change == "none")


def test_a_wrong_score_breaks_the_claim() -> None:
    """Errors of one part in 2^45 are caught: the claim is close to what float64 really does."""
    problem = random_problem(12, max_length=7)
    assert problem.num_queries
    assert problem.num_keys
    good = fp64.forward(problem)
    claimed = own_error.forward_error(problem, good, unit.FP64)
    expected = expected_forward(problem)["lse"]
    wrong = good.lse * (1.0 + 2.0**-45)
    assert excess(good.lse, expected, claimed.lse) <= 1.0  # type: ignore[arg-type]
    assert excess(wrong, expected, claimed.lse) > 1.0  # type: ignore[arg-type]
