"""Every term of the running bound is needed: inputs on which float64 errs through that term alone.

Random problems rarely come near a worst case, so a forgotten term can hide among the others. Each
problem here makes float64 wrong by much more than all other terms claim together.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flashcheck.oracle import exact, fp64, own_error, unit
from flashcheck.problem import Problem
from tests.oracle.compare import DIGITS, excess, halves

BIG = 2.0**53


def rows(*values: tuple[float, ...]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)[None, None]


# float64 makes 2^53 + 1 - 2^53 = 0, so this key's score is off by one and no other's is.
Q, WRONG = (1.0, 1.0, 1.0), (BIG, 1.0, -BIG)


def forward_holds(problem: Problem, name: str, at_least: float) -> None:
    """The claim holds, and float64 is wrong by ``at_least``: the case does exercise something."""
    got = fp64.forward(problem)
    claimed = getattr(own_error.forward_error(problem, got, unit.FP64), name)
    head = exact.forward(problem, 0, 0, digits=DIGITS)
    holds(getattr(got, name), [[getattr(head, name)]], claimed, at_least)


def backward_holds(problem: Problem, names: str, at_least: float, **given: Tensor) -> None:
    """The same for gradients; ``names`` separated by spaces."""
    forward, got = fp64.forward(problem), fp64.backward(problem, **given)
    error = own_error.backward_error(problem, forward, got, unit.FP64, **given)
    expected = exact.backward(problem, digits=DIGITS, **given)  # type: ignore[arg-type]
    for name in names.split():
        holds(getattr(got, name), getattr(expected, name), getattr(error, name), at_least)


def holds(got: Tensor, expected: Any, claimed: Tensor, at_least: float) -> None:
    exactly = halves(expected)
    assert float((got - exactly.hi).abs().max()) >= at_least
    assert excess(got, exactly, claimed) <= 1.0


def test_another_keys_error_moves_a_probability() -> None:
    """R: key 1 is exact and heaviest; its p is wrong because key 0's weight is."""
    problem = Problem(q=rows(Q), k=rows(WRONG, (0.0, 0.5, 0.0)), v=rows((0.0,), (1.0,)), scale=1.0)
    forward_holds(problem, "probabilities", 0.1)
    forward_holds(problem, "out", 0.1)


def test_the_heaviest_keys_error_moves_all_others() -> None:
    """D_t: key 0 is heaviest and wrong, the others are exact."""
    problem = Problem(q=rows(Q), k=rows(WRONG, (0.0, -0.5, 0.0)), v=rows((0.0,), (1.0,)), scale=1.0)
    forward_holds(problem, "probabilities", 0.1)
    forward_holds(problem, "out", 0.1)
    forward_holds(problem, "lse", 0.1)


def test_a_score_error_moves_the_sinks_share() -> None:
    k, sink = rows(WRONG), torch.zeros(1, dtype=torch.float64)
    problem = Problem(q=rows(Q), k=k, v=rows((1.0,)), scale=1.0, sink=sink, dout=rows((1.0,)))
    forward_holds(problem, "out", 0.1)
    backward_holds(problem, "dsink", 0.01)


def test_delta_inherits_the_error_of_the_output() -> None:
    """Key 2 has dP = delta as float64 sees it, so its dS errs through delta alone."""
    keys = rows(WRONG, (0.0, 0.5, 0.0), (0.0, 0.0, 0.0))
    p = fp64.forward(Problem(q=rows(Q), k=keys, v=rows((0.0,), (0.0,), (0.0,)), scale=1.0)).probabilities
    p0, p1, p2 = p.flatten().tolist()
    values = rows((1.0,), (-1.0,), ((p0 - p1) / (1 - p2),))
    bias = torch.zeros(1, 1, 1, 3, dtype=torch.float64)
    problem = Problem(q=rows(Q), k=keys, v=values, scale=1.0, bias=bias, dout=rows((1.0,)))
    backward_holds(problem, "dbias", 0.01)
    got = fp64.backward(problem)
    claimed = own_error.backward_error(problem, fp64.forward(problem), got, unit.FP64)
    expected = halves(exact.backward(problem, digits=DIGITS).dbias)
    assert got.dbias is not None
    assert claimed.dbias is not None
    assert abs(float(got.dbias[..., 2] - expected.hi[..., 2])) > 0.01


def test_the_sum_in_delta() -> None:
    """dot(dv): dO . O = 2^53 + 1 - 2^53."""
    problem = Problem(q=rows((0.0,)), k=rows((1.0,)), v=rows((0.0, 0.0, 0.0)), dout=rows((1.0, 1.0, 1.0)))
    out, lse = rows((BIG, 1.0, -BIG)), torch.zeros(1, 1, 1, dtype=torch.float64)
    backward_holds(problem, "dq", 0.5, out=out, lse=lse)


def test_the_sum_in_dp() -> None:
    """dot(dv): dO . V = 2^53 + 1 - 2^53, with a stored output of zero."""
    problem = Problem(q=rows((0.0,)), k=rows((1.0,)), v=rows((BIG, 1.0, -BIG)), dout=rows((1.0, 1.0, 1.0)))
    out, lse = rows((0.0, 0.0, 0.0)), torch.zeros(1, 1, 1, dtype=torch.float64)
    backward_holds(problem, "dq", 0.5, out=out, lse=lse)


def test_a_product_error_moves_the_softcaps_slope() -> None:
    """e_z: x is off by 2^-21, which is 2^-11 of the cap; P moves by 2^-21 only."""
    x = 2.0**-11 + 2.0**-21
    k = rows((2.0**33, x, -(2.0**33)), (0.0, 0.0, 0.0))
    problem = Problem(q=rows(Q), k=k, v=rows((0.0,), (1.0,)), scale=1.0, softcap=2.0**-10, dout=rows((1.0,)))
    backward_holds(problem, "dk", 2.0**-16)


def test_a_stored_lse_does_not_cancel_a_score_error() -> None:
    problem = Problem(q=rows(Q), k=rows(WRONG), v=rows((1.0,)), scale=1.0, dout=rows((1.0,)))
    lse = torch.ones(1, 1, 1, dtype=torch.float64)
    backward_holds(problem, "dv", 0.5, out=rows((0.0,)), lse=lse)


class TestSumsOfGradients:
    """dot(n): 2^53 + 1 + 1 + ... loses the ones that meet 2^53 before they have met each other.

    The errors of single contributions, some 6 u 2^53 = 6, must not cover for a missing term: the
    sums are long enough to lose more even where they run in many lanes.
    """

    n = 8192

    def long(self) -> Tensor:
        x = torch.ones(1, 1, self.n, 1, dtype=torch.float64)
        x[:, :, 0] = BIG
        return x

    def stored(self, count: int) -> dict[str, Tensor]:
        """O = 0 and LSE = s = 1, so P = 1."""
        shape = (1, 1, count)
        return {"out": torch.zeros(*shape, 1).double(), "lse": torch.ones(shape).double()}

    def test_over_rows(self) -> None:
        ones = torch.ones(1, 1, self.n, 1, dtype=torch.float64)
        bias = torch.zeros(1, 1, 1, 1, dtype=torch.float64)
        problem = Problem(q=ones, k=rows((1.0,)), v=rows((1.0,)), scale=1.0, bias=bias, dout=self.long())
        backward_holds(problem, "dk dv dbias dscale", 8.0, **self.stored(self.n))

    def test_over_keys(self) -> None:
        ones = torch.ones(1, 1, self.n, 1, dtype=torch.float64)
        problem = Problem(q=rows((1.0,)), k=ones, v=self.long(), scale=1.0, dout=rows((1.0,)))
        backward_holds(problem, "dq", 8.0, **self.stored(1))
