"""The backward ladder: every gradient meets its error, whatever the blocks and the demand."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from flashcheck.oracle import exact, fp64, ladder_backward
from flashcheck.oracle.ladder import RUNGS
from flashcheck.oracle.ladder_backward import Gradients
from flashcheck.problem import Problem
from tests.oracle.compare import DIGITS, excess, halves
from tests.oracle.problems import random_problem

SEEDS = [s for s in range(12) if random_problem(s).num_queries and random_problem(s).num_keys]


def demand(problem: Problem, fill: float) -> Gradients:
    return ladder_backward.like(problem, fill)


@pytest.mark.parametrize("conditional", [False, True])
@pytest.mark.parametrize("wanted", [1e-9, 1e-20, 1e-33])
@pytest.mark.parametrize("seed", SEEDS)
def test_served_gradients_meet_their_error_and_the_demand(
    seed: int, wanted: float, conditional: bool
) -> None:
    problem = random_problem(seed, max_length=5, spread=1.0 if seed % 2 else 2.0**9)
    if 0 in (problem.num_queries, problem.num_keys):
        pytest.skip("nothing is computed")
    given: dict[str, Tensor] = {}
    if conditional:
        full = fp64.forward(problem)
        given = {"out": full.out.float().double(), "lse": full.lse.float().double()}
    two_rows = 8 * problem.group * problem.num_keys * 2
    served = ladder_backward.backward(problem, demand(problem, wanted), block_bytes=two_rows, **given)
    expected = exact.backward(problem, digits=DIGITS, **given)  # type: ignore[arg-type]
    assert served.resolved
    for name, value in served.gradients.named():
        claimed = getattr(served.errors, name)
        assert excess(value, halves(getattr(expected, name)), claimed) <= 1.0, name
    if wanted == 1e-33 and bool(problem.visible().any()):
        assert int(served.rung.max()) >= 1


def test_dq_lifts_its_block_and_no_other() -> None:
    gen = torch.Generator().manual_seed(0)
    q, k, v, dout = (torch.randn(1, 2, 8, 4, generator=gen, dtype=torch.float64) for _ in range(4))
    k[:, :, 1] = k[:, :, 0] = 4.0 * k[:, :, 0]
    q[0, 1, 5] = k[0, 1, 0] * 2.0**40  # a tie that float64 cannot prove
    problem = Problem(q=q, k=k, v=v, dout=dout)
    allowed = demand(problem, torch.inf)
    allowed.dq.fill_(2.0**-24)
    served = ladder_backward.backward(problem, allowed, block_bytes=8 * 8 * 2)
    expected = torch.zeros(1, 2, 8, dtype=torch.int8)
    expected[0, 1, 4:6] = 1
    assert bool((served.rung == expected).all())


def test_a_near_tie_gives_the_wrong_gradient_without_the_ladder() -> None:
    q = torch.tensor([[[[1.0, 1.0, 1.0]]]]).double()
    k = torch.tensor([[[[2.0**60, 1.0, -(2.0**60)], [2.0**60, 2.0, -(2.0**60)]]]]).double()
    v = torch.tensor([[[[0.0], [1.0]]]]).double()
    problem = Problem(q=q, k=k, v=v, scale=1.0, dout=torch.ones(1, 1, 1, 1))
    allowed = demand(problem, torch.inf)
    allowed.dv.fill_(2.0**-24)
    served = ladder_backward.backward(problem, allowed)
    assert RUNGS[int(served.rung)] == "double-double"
    right = torch.softmax(torch.tensor([1.0, 2.0]).double(), 0)  # dV = P^T dO = P
    assert float((served.gradients.dv.flatten() - right).abs().max()) < 1e-12
    assert float((fp64.backward(problem).dv.flatten() - right).abs().max()) > 0.2


def test_poisoned_heads_stay_in_float64() -> None:
    gen = torch.Generator().manual_seed(1)
    q, k, v, dout = (torch.randn(1, 2, 4, 3, generator=gen, dtype=torch.float64) for _ in range(4))
    v[0, 0, 1, 1] = torch.nan
    problem = Problem(q=q, k=k, v=v, dout=dout)
    served = ladder_backward.backward(problem, demand(problem, 1e-30))
    assert served.rung[0, 0].tolist() == [0] * 4
    assert min(served.rung[0, 1].tolist()) > 0
    assert bool(torch.isnan(served.gradients.dq[0, 0]).all())
    assert bool(torch.isfinite(served.errors.dq[0, 1]).all())
