"""The ladder climbs where float64 is wrong, only there, and says which rung served which row."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from flashcheck.oracle import exact, fp64, ladder
from flashcheck.oracle.ladder import RUNGS, AllowedForward
from flashcheck.problem import Problem
from tests.oracle.compare import DIGITS, excess, halves
from tests.oracle.problems import random_problem

FP32_UNIT = 2.0**-24


def allowed(problem: Problem, out: float, lse: float) -> AllowedForward:
    shape = (problem.batch, problem.num_heads, problem.num_queries)
    return AllowedForward(
        torch.full((*shape, problem.value_dim), out).double(), torch.full(shape, lse).double()
    )


def rows(*values: tuple[float, ...]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)[None, None]


@dataclass(frozen=True)
class NearTie:
    """Two keys whose logits are huge and close; the value of key j is j, so out = p_1."""

    name: str
    problem: Problem
    expected: float
    served_by: str


def near_ties() -> list[NearTie]:
    values = rows((0.0,), (1.0,))

    def problem(q: Tensor, k: Tensor, scale: float) -> Problem:
        return Problem(q=q, k=k, v=values, scale=scale)

    big, square = 2.0**60, 2.0**50
    # Products that float64 holds exactly, with a gap of 2^-5 at 2e14: only scale * x is rounded.
    q, gap = 3.0**10, 37.0
    base = 2e14 * math.sqrt(128) / q
    k1 = float(math.floor(base))
    return [
        NearTie(
            "cancelling products",
            problem(rows((1.0, 1.0, 1.0)), rows((big, 1.0, -big), (big, 2.0, -big)), 1.0),
            1 / (1 + math.exp(-1)),
            "double-double",
        ),
        NearTie(
            "logits of 1e30",
            problem(rows((square, 1.0)), rows((square, 0.5), (square, 1.0)), 1.0),
            1 / (1 + math.exp(-0.5)),
            "exact",
        ),
        NearTie(
            "the multiplication by scale",
            problem(rows((q, 1.0)), rows((k1, 0.0), (k1, gap / 32.0)), float(1 / math.sqrt(128))),
            1 / (1 + math.exp(-gap / 32.0 / math.sqrt(128))),
            "double-double",
        ),
    ]


@pytest.mark.parametrize("case", near_ties(), ids=lambda case: case.name)
def test_near_ties_climb_and_come_out_right(case: NearTie) -> None:
    want = allowed(case.problem, out=FP32_UNIT, lse=torch.inf)
    low = float(fp64.forward(case.problem).out)
    served = ladder.forward(case.problem, want)
    assert RUNGS[int(served.rung)] == case.served_by
    assert bool(served.resolved.all())
    assert abs(float(served.out) - case.expected) < 1e-12
    # Without the ladder an exact kernel would be rejected: float64 is off by more than is allowed.
    assert abs(low - case.expected) > FP32_UNIT
    assert float(served.out_error) <= FP32_UNIT / 64


def test_a_tie_that_the_caller_does_not_mind_stays_in_float64() -> None:
    for case in near_ties():
        served = ladder.forward(case.problem, allowed(case.problem, out=torch.inf, lse=torch.inf))
        assert RUNGS[int(served.rung)] == "fp64"


def test_only_the_rows_in_need_climb() -> None:
    gen = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 2, 6, 4, generator=gen, dtype=torch.float64) for _ in range(3))
    k[:, :, 0] *= 4.0
    k[:, :, 1] = k[:, :, 0]  # a tie at the top for every query that points that way
    q[1, 0, 3] = k[1, 0, 0] * 2.0**50
    q[0, 1, 5] = k[0, 1, 0] * 2.0**90
    q[0, 0, 2] = -k[0, 0, 0] * 2.0**50  # as large, but one other key has all the weight
    problem = Problem(q=q, k=k, v=v)
    served = ladder.forward(problem, allowed(problem, out=FP32_UNIT, lse=torch.inf))
    expected = torch.zeros(2, 2, 6, dtype=torch.int8)
    expected[1, 0, 3], expected[0, 1, 5] = 1, 2
    assert bool((served.rung == expected).all())


def test_ordinary_rows_never_climb_for_an_fp32_kernel() -> None:
    gen = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, 64, 64, generator=gen).bfloat16() for _ in range(3))
    problem = Problem(q=q, k=k, v=v)
    served = ladder.forward(problem, allowed(problem, out=FP32_UNIT / 64, lse=FP32_UNIT))
    assert int(served.rung.max()) == 0


@pytest.mark.parametrize("wanted", [1e-9, 1e-16, 1e-25, 0.0])
@pytest.mark.parametrize("seed", range(18))
def test_served_values_meet_their_error_and_the_demand(seed: int, wanted: float) -> None:
    problem = random_problem(seed, max_length=5, spread=1.0 if seed % 2 else 2.0**12)
    if 0 in (problem.num_queries, problem.num_keys):
        pytest.skip("nothing is computed")
    want = allowed(problem, out=wanted, lse=wanted)
    everything = torch.arange(problem.num_queries)
    served = ladder.forward_rows(problem, want, everything)
    heads = [
        [exact.forward(problem, b, h, digits=DIGITS) for h in range(problem.num_heads)]
        for b in range(problem.batch)
    ]
    out = halves([[head.out for head in batch] for batch in heads])
    lse = halves([[head.lse for head in batch] for batch in heads])
    assert excess(served.quantities.out, out, served.out_error) <= 1.0
    assert excess(served.quantities.lse, lse, served.lse_error) <= 1.0
    assert bool(served.resolved.all())
    rounding = 2 * ladder.ROUNDING * served.quantities.out.abs()
    assert bool((served.out_error <= wanted / 64 + rounding + 2 * ladder.SMALLEST_DEMAND).all())
    probabilities = halves([[head.probabilities for head in batch] for batch in heads])
    assert (
        excess(served.quantities.probabilities, probabilities, torch.full_like(out.hi[..., :1], 1e-9)) <= 1.0
    )


def test_row_blocks_change_nothing() -> None:
    gen = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(1, 2, 23, 8, generator=gen, dtype=torch.float64) for _ in range(3))
    q[0, 1, 7] *= 2.0**50
    problem = Problem(q=q, k=k, v=v, causal="bottom_right", sink=torch.tensor([0.3, -1.0]))
    want = allowed(problem, out=FP32_UNIT, lse=torch.inf)
    whole = ladder.forward(problem, want)
    tiny = 8 * 2 * 23 * 4  # four rows a block
    sizes = [len(block) for block, _ in ladder.blocks(problem, want, tiny)]
    assert sizes == [4, 4, 4, 4, 4, 3]
    blocked = ladder.forward(problem, want, tiny)
    assert bool((whole.rung == blocked.rung).all())
    # Block shapes change the order of sums in a matrix product, so values agree to both claims.
    assert bool(((whole.out - blocked.out).abs() <= whole.out_error + blocked.out_error).all())
    assert bool(((whole.lse - blocked.lse).abs() <= whole.lse_error + blocked.lse_error).all())


def test_rows_that_see_nan_stay_in_float64_and_claim_nothing() -> None:
    gen = torch.Generator().manual_seed(2)
    q, k, v = (torch.randn(1, 1, 4, 3, generator=gen, dtype=torch.float64) for _ in range(3))
    v[0, 0, 3, 0] = torch.nan
    problem = Problem(q=q, k=k, v=v, causal="top_left")
    served = ladder.forward(problem, allowed(problem, out=0.0, lse=0.0))
    assert served.rung[0, 0].tolist()[3] == 0
    assert bool(torch.isnan(served.out[0, 0, 3, 0]))
    assert bool(torch.isinf(served.out_error[0, 0, 3]).all())
    assert min(served.rung[0, 0].tolist()[:3]) > 0
    assert bool(torch.isfinite(served.out_error[0, 0, :3]).all())


def test_overflowing_scores_are_not_trusted() -> None:
    """float64 makes the only score -inf and the row look empty; exactly, p = 1 and O = V.

    The value is served right; the proof is not claimed, because it is evaluated in float64 too.
    """
    q = torch.full((1, 1, 1, 2), 1e200, dtype=torch.float64)
    k = torch.full((1, 1, 1, 2), -1e200, dtype=torch.float64)
    problem = Problem(q=q, k=k, v=torch.full((1, 1, 1, 1), 3.0).double())
    assert float(fp64.forward(problem).out) == 0.0
    served = ladder.forward(problem, allowed(problem, out=FP32_UNIT, lse=torch.inf))
    assert RUNGS[int(served.rung)] == "exact"
    assert float(served.out) == 3.0
    assert not bool(served.resolved)
    assert float(served.out_error) >= 3.0


def test_zero_lengths() -> None:
    empty = torch.zeros(1, 2, 0, 4)
    some = torch.randn(1, 2, 3, 4, generator=torch.Generator().manual_seed(0))
    for problem in (Problem(q=empty, k=some, v=some), Problem(q=some, k=empty, v=empty)):
        served = ladder.forward(problem, allowed(problem, out=0.0, lse=0.0))
        assert served.out.shape == problem.q.shape
        assert bool((served.out == 0).all())
        assert bool((served.lse == -torch.inf).all())
        assert bool((served.rung == 0).all())
