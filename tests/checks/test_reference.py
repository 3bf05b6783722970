"""Verdicts rest on the rung that they need: without the climb, right kernels fail and wrong ones pass."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from flashcheck.arithmetic import Accumulator, Arithmetic, Machine, flash
from flashcheck.bounds.interval import Interval, rounded_interval
from flashcheck.bounds.result import BackwardBound, ForwardBound, TensorBound, unpredicted
from flashcheck.checks import CHECKS, Judged, Status, check_named, reference
from flashcheck.checks.reference import backward_reference, forward_reference, hinges
from flashcheck.formats import BF16, E4M3, FP32, Format, round_nearest
from flashcheck.inputs.spec import ProblemSpec
from flashcheck.kernel import Capabilities, ForwardResult, Kernel
from flashcheck.loading import load
from flashcheck.oracle import exact, fp64, own_error, screen
from flashcheck.oracle.quantities import BackwardQuantities
from flashcheck.oracle.unit import FP64
from flashcheck.problem import Problem
from tests.oracle.problems import random_problem
from tests.oracle.test_ladder import NearTie, near_ties

EXACT_SUMS = Machine("exact sums", accumulators={"fp32": Accumulator(precision=113)}, fused_multiply_add=True)
"""A matrix unit with a long accumulator: its kernels tell near-ties apart that float64 does not."""


def declared(_: Problem) -> Arithmetic:
    return flash(FP32, scale_placement="exponent_subtract_first", scale_roundings=0, block_keys=16)


def subject(out: Tensor, lse: Tensor, gradients: dict[str, Tensor] | None = None) -> Kernel:
    """A kernel on ``EXACT_SUMS`` that returns these tensors."""
    return Kernel(
        "subject",
        lambda _: ForwardResult(out.float(), lse.float()),
        backward=None if gradients is None else lambda *_: {n: x.float() for n, x in gradients.items()},
        capabilities=Capabilities(dtypes=("fp32",), options=("scale",), lse=True),
        arithmetic=declared,
        machine=lambda _: EXACT_SUMS,
    )


def cancelling() -> Problem:
    """q = (1, 1, 1), k = (2^60, 1, -2^60) and (2^60, 2, -2^60)."""
    p = near_ties()[0].problem
    return p.replaced(q=p.q.float(), k=p.k.float(), v=p.v.float())


def verdict(kernel: Kernel, problem: Problem, check: str) -> Status:
    return CHECKS[check].on(Judged(kernel, problem)).status


def never_climb(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "demand", lambda _, value: torch.full_like(value, torch.inf))


def test_without_the_climb_the_forward_verdict_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = cancelling()
    low, right = fp64.forward(problem), exact.forward_all(problem)
    assert abs(float(right.out) - 0.7310585786300049) < 1e-15
    assert float(low.out) == 0.5
    honest, fooled = subject(right.out, right.lse), subject(low.out, low.lse)
    assert verdict(honest, problem, "forward.bound") is Status.PASS
    assert verdict(fooled, problem, "forward.bound") is Status.FAIL
    never_climb(monkeypatch)
    assert verdict(honest, problem, "forward.bound") is Status.FAIL
    assert verdict(fooled, problem, "forward.bound") is Status.PASS


def test_without_the_climb_the_backward_verdict_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = cancelling().replaced(dout=torch.ones(1, 1, 1, 1))
    right = exact.forward_all(problem)
    stored = right.out.float(), right.lse.float()
    gradients = exact.backward(problem, *stored).rounded(problem)
    honest = subject(right.out, right.lse, {"dq": gradients.dq, "dk": gradients.dk, "dv": gradients.dv})
    low = fp64.backward(problem, *stored)
    fooled = subject(right.out, right.lse, {"dq": low.dq, "dk": low.dk, "dv": low.dv})
    assert verdict(honest, problem, "backward.bound") is Status.PASS
    assert verdict(fooled, problem, "backward.bound") is Status.FAIL
    never_climb(monkeypatch)
    assert verdict(honest, problem, "backward.bound") is Status.FAIL


def bound_of(out: Tensor, lse: Tensor, error: float) -> ForwardBound:
    def tensor(x: Tensor) -> TensorBound:
        interval = rounded_interval(x, torch.full_like(x, error), FP32)
        return unpredicted(interval)

    return ForwardBound(tensor(out), tensor(lse))


@pytest.mark.parametrize("case", near_ties(), ids=lambda case: case.name)
def test_near_ties_are_served_by_the_rung_that_settles_them(case: NearTie) -> None:
    """A bound of 2^-20 around float64's value excludes the right one; around the served value it does not."""
    low = fp64.forward(case.problem)
    served = forward_reference(case.problem, low, bound_of(low.out, low.lse, 2.0**-20), None)
    assert served.climbed
    assert abs(float(served.quantities.out) - case.expected) < 1e-12
    right = torch.full_like(low.out, case.expected).float()
    for quantities, accepted in ((low, False), (served.quantities, True)):
        interval = bound_of(quantities.out, quantities.lse, 2.0**-20).out.interval
        assert bool(interval.accepts(right)) is accepted
    # LSE lies at 2e14 and 1e30: float64 itself is coarser than the bound there, and this is said.
    assert served.rows[case.served_by] == 1 or served.rows["exact"] == 1


def test_a_bound_that_excludes_nothing_asks_for_nothing() -> None:
    for case in near_ties():
        low = fp64.forward(case.problem)
        served = forward_reference(case.problem, low, bound_of(low.out, low.lse, torch.inf), None)
        assert served.rows == {"fp64": 1}
        assert not served.climbed


def interval(exact_value: float, error: float) -> Interval:
    """With this limit to the bit: ``rounded_interval`` adds a little."""
    x = torch.tensor([exact_value], dtype=torch.float64)
    return replace(rounded_interval(x, torch.zeros_like(x), FP32), error=torch.full_like(x, error))


def test_a_verdict_hinges_only_at_the_end_of_what_is_accepted() -> None:
    ulp, error = 2.0**-23, torch.tensor([2.0**-50])
    edge = interval(1.0, 2.5 * ulp)  # its end lies on a rounding boundary
    for offset, expected in ((0, False), (1, False), (2, False), (3, True), (4, False)):
        got = torch.tensor([1.0 + offset * ulp], dtype=torch.float64)
        assert bool(hinges(edge, got, error)) is expected, offset
    inside = interval(1.0, 2.7 * ulp)  # here it does not
    assert not bool(hinges(inside, torch.tensor([1.0 + 3 * ulp], dtype=torch.float64), error))
    assert not bool(hinges(edge, torch.tensor([torch.nan], dtype=torch.float64), error))


def test_a_row_climbs_because_the_verdict_on_it_hinges() -> None:
    gen = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 1, 4, 8, generator=gen) for _ in range(3))
    problem = Problem(q=q, k=k, v=v)
    low = fp64.forward(problem)
    bound = bound_of(low.out, low.lse, 1e-6)
    # An end that is a rounding boundary to within float64's error, and the kernel exactly there.
    end = bound.out.interval.upper[0, 0, 2, 3]
    half = float(torch.nextafter(end.float(), torch.tensor(torch.inf)).double() - end) / 2
    bound.out.interval.error[0, 0, 2, 3] = end + half - low.out[0, 0, 2, 3]
    got = low.out.float()
    got[0, 0, 2, 3] = end.float() + 2 * half
    calm = forward_reference(problem, low, bound, ForwardResult(low.out.float(), low.lse.float()))
    assert calm.rows == {"fp64": 4}
    hinging = forward_reference(problem, low, bound, ForwardResult(got, low.lse.float()))
    assert hinging.rows["fp64"] == 3
    assert sum(hinging.rows.values()) == 4


def test_a_value_that_is_right_for_certain_asks_for_nothing() -> None:
    """Whatever its limit is: float64's error does not reach the end of what rounds to it."""
    gen = torch.Generator().manual_seed(0)
    q, k, v, dout = (torch.randn(1, 1, 4, 8, generator=gen) for _ in range(4))
    problem = Problem(q=q, k=k, v=v, dout=dout)
    low = fp64.forward(problem)
    bound, got, lse = bound_of(low.out, low.lse, 1e-30), low.out.float(), low.lse.float()
    assert forward_reference(problem, low, bound, None).climbed
    assert forward_reference(problem, low, bound, ForwardResult(got, lse)).rows == {"fp64": 4}
    got[0, 0, 2, 3] = torch.nextafter(got[0, 0, 2, 3], torch.tensor(torch.inf))
    wrong = forward_reference(problem, low, bound, ForwardResult(got, lse))
    assert wrong.rows["fp64"] == 3

    gradients = fp64.backward(problem, low.out.float(), lse)

    def small(x: BackwardQuantities) -> BackwardBound:
        return BackwardBound({"dq": unpredicted(rounded_interval(x.dq, torch.full_like(x.dq, 1e-30), FP32))})

    dq, stored = gradients.dq.float(), (low.out.float(), lse)
    assert backward_reference(problem, low, gradients, small, {"dq": dq}, stored).rows == {"fp64": 4}
    dq[0, 0, 2, 3] = torch.nextafter(dq[0, 0, 2, 3], torch.tensor(torch.inf))
    assert "fp64" not in backward_reference(problem, low, gradients, small, {"dq": dq}, stored).rows


def between(coarse: Tensor, proved: Tensor) -> float:
    """An error of element [0, 0, 2, 3] that the screen cannot exclude and float64's own proof can."""
    error = math.sqrt(float(coarse[0, 0, 2, 3]) * float(proved[0, 0, 2, 3]))
    assert 2 * float(proved[0, 0, 2, 3]) < error < float(coarse[0, 0, 2, 3]) / 2
    return error


def test_no_row_climbs_because_the_screen_is_coarse() -> None:
    gen = torch.Generator().manual_seed(0)
    q, k, v, dout = (torch.randn(1, 1, 4, 8, generator=gen) for _ in range(4))
    problem = Problem(q=q, k=k, v=v, dout=dout)
    low = fp64.forward(problem)
    proved = own_error.forward_error(problem, low, FP64)
    bound = bound_of(low.out, low.lse, 1e-6)
    end = bound.out.interval.upper[0, 0, 2, 3]
    half = float(torch.nextafter(end.float(), torch.tensor(torch.inf)).double() - end) / 2
    away = between(screen.forward_error(problem, low)[0], proved.out)
    bound.out.interval.error[0, 0, 2, 3] = end + half - away - low.out[0, 0, 2, 3]
    got = low.out.float()
    got[0, 0, 2, 3] = end.float() + 2 * half
    assert bool(hinges(bound.out.interval, got.double(), screen.forward_error(problem, low)[0]).any())
    assert forward_reference(problem, low, bound, ForwardResult(got, low.lse.float())).rows == {"fp64": 4}


def test_no_gradient_climbs_because_the_screen_is_coarse() -> None:
    gen = torch.Generator().manual_seed(0)
    q, k, v, dout = (torch.randn(1, 1, 4, 8, generator=gen) for _ in range(4))
    problem = Problem(q=q, k=k, v=v, dout=dout)
    forward = fp64.forward(problem)
    out, lse = forward.out.float(), forward.lse.float()
    low = fp64.backward(problem, out, lse)
    proved = own_error.backward_error(problem, forward, low, FP64, out=out, lse=lse)
    coarse = screen.backward_error(problem, forward, low, out=out, lse=lse)["dq"]
    got = low.dq.float()
    above = float(torch.nextafter(got[0, 0, 2, 3], torch.tensor(torch.inf)))
    limit = torch.full_like(low.dq, 1e-6)
    limit[0, 0, 2, 3] = (float(got[0, 0, 2, 3]) + above) / 2 - low.dq[0, 0, 2, 3] - between(coarse, proved.dq)
    got[0, 0, 2, 3] = above

    def bound_of(gradients: BackwardQuantities) -> BackwardBound:
        exactly = replace(rounded_interval(gradients.dq, limit, FP32), error=limit)
        return BackwardBound({"dq": unpredicted(exactly)})

    assert bool(hinges(bound_of(low).tensors["dq"].interval, got.double(), coarse).any())
    assert backward_reference(problem, forward, low, bound_of, {"dq": got}, (out, lse)).rows == {"fp64": 4}


def hinges_plainly(interval: Interval, got: Tensor, error: Tensor) -> Tensor:
    """By the definition, element by element."""

    def accepted(limit: Tensor) -> Tensor:
        lower, upper = (
            round_nearest(x, interval.fmt) for x in (interval.exact - limit, interval.exact + limit)
        )
        return (got >= lower) & (got <= upper)

    least, most = (interval.error - error).clamp(min=0.0), interval.error + error
    known = torch.isfinite(got) & torch.isfinite(interval.exact) & torch.isfinite(interval.error + error)
    return known & ~accepted(least) & accepted(most)


@pytest.mark.parametrize("fmt", [FP32, BF16, E4M3], ids=str)
def test_quick_ways_to_a_hinge_change_none(fmt: Format) -> None:
    gen = torch.Generator().manual_seed(0)
    found = 0
    for share in (0.02, 0.5):  # of elements that lie near the end of what is accepted
        for largest in (1.0, fmt.max_finite):
            exact = largest * torch.randn(2000, generator=gen, dtype=torch.float64)
            limit = exact.abs() * fmt.unit_roundoff * torch.rand(2000, generator=gen).double().mul(3)
            near = torch.rand(2000, generator=gen) < share
            got = round_nearest(torch.where(near, exact + limit * 1.01, exact), fmt)
            got[:3] = torch.tensor([torch.nan, torch.inf, -torch.inf])
            limit[3:5] = torch.inf
            error = limit.clamp(max=1e30) * torch.rand(2000, generator=gen).double()
            around = replace(rounded_interval(exact, limit, fmt), error=limit)
            expected = hinges_plainly(around, got, error)
            assert torch.equal(hinges(around, got, error), expected)
            found += int(expected.sum())
    assert found > 100


def test_gradients_stop_at_the_rung_that_settles_a_verdict() -> None:
    gen = torch.Generator().manual_seed(0)
    q, k, v, dout = (torch.randn(1, 1, 4, 8, generator=gen) for _ in range(4))
    problem = Problem(q=q, k=k, v=v, dout=dout)
    forward = fp64.forward(problem)
    stored = forward.out.float(), forward.lse.float()
    low = fp64.backward(problem, *stored)
    got = low.dq.float()
    above = float(torch.nextafter(got[0, 0, 2, 3], torch.tensor(torch.inf)))
    limit = torch.full_like(low.dq, 1e-6)
    # The end of what is accepted is a rounding boundary to within float64's error, the kernel just past it.
    limit[0, 0, 2, 3] = (float(got[0, 0, 2, 3]) + above) / 2 - low.dq[0, 0, 2, 3]

    def bound_of(gradients: BackwardQuantities) -> BackwardBound:
        bound = rounded_interval(gradients.dq, limit, FP32)
        exactly = replace(bound, error=limit)  # ``rounded_interval`` adds a little
        return BackwardBound({"dq": unpredicted(exactly)})

    calm = backward_reference(problem, forward, low, bound_of, {"dq": got}, stored)
    assert calm.rows == {"fp64": 4}
    got[0, 0, 2, 3] = above
    hinging = backward_reference(problem, forward, low, bound_of, {"dq": got}, stored)
    assert hinging.rows == {"double-double": 4}


@pytest.mark.parametrize("seed", range(6))
def test_judging_counts_every_row_once(seed: int) -> None:
    problem = random_problem(seed, max_length=6).replaced(dout=None, dlse=None)
    low = fp64.forward(problem)
    served = forward_reference(problem, low, bound_of(low.out, low.lse, 1e-25), None)
    assert sum(n for name, n in served.rows.items() if name != reference.UNRESOLVED) == low.lse.numel()
    for name, field in named(served.quantities):
        assert field.shape == getattr(low, name).shape


def named(quantities: object) -> Iterator[tuple[str, Tensor]]:
    for name in type(quantities).__slots__:  # type: ignore[attr-defined]
        yield name, getattr(quantities, name)


def test_rows_of_a_problem_of_one_pair_can_climb() -> None:
    """Its tensors are expanded views of one another, which may not be written as they are."""
    spec = ProblemSpec(
        num_heads=2,
        num_queries=1,
        num_keys=1,
        head_dim=64,
        value_dim=512,
        scale=-0.125,
        mask="first_key",
        softcap=1.0,
        sink="high",
        family="constant_v",
        gradient="parallel",
        seed=1652222477,
    )
    judged = Judged(load("emulator.hopper.flash.fp32"), spec.build())
    assert not check_named("forward.bound").on(judged).failed
