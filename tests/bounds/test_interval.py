"""The acceptance interval and the margin agree with their definitions, by brute force over a small format."""

from __future__ import annotations

import math

import pytest
import torch

from flashcheck.bounds.interval import rounded_interval
from flashcheck.formats import BF16, E4M3, E5M2, FP16, FP32, format_named, round_inside, round_nearest

FORMATS = [FP32, FP16, BF16, E4M3, E5M2]


def samples(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    exact = torch.randn(400, generator=generator, dtype=torch.float64)
    exact *= torch.exp2(torch.randint(-18, 8, (400,), generator=generator).double())
    error = exact.abs() * torch.exp2(-torch.randint(1, 20, (400,), generator=generator).double())
    return exact, error


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_everything_within_the_error_is_accepted_after_rounding(fmt):
    exact, error = samples(1)
    interval = rounded_interval(exact, error, fmt)
    for share in torch.linspace(-1, 1, 41, dtype=torch.float64):
        got = round_nearest(exact + share * error, fmt)
        assert interval.accepts(got).all()
        assert (interval.margin(got) <= share.abs() + 1e-6).all()


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_the_next_value_outside_is_rejected(fmt):
    exact, error = samples(2)
    interval = rounded_interval(exact, error, fmt)
    above = round_nearest(exact + error, fmt)
    beyond = round_nearest(above + above.abs() * 2.0 ** (1 - fmt.precision) * 1.01 + fmt.quantum, fmt)
    different = beyond > interval.upper
    assert different.any()
    assert (interval.margin(beyond)[different] > 1).all()
    assert (interval.margin(beyond)[~different] <= 1).all()


def test_margin_one_is_the_boundary():
    exact, error = torch.tensor([1.0]), torch.tensor([0.5])
    interval = rounded_interval(exact.double(), error.double(), format_named("fp64"))
    assert interval.margin(torch.tensor([1.25])).item() == pytest.approx(0.5)
    assert interval.margin(torch.tensor([1.5])).item() == pytest.approx(1.0)
    assert interval.margin(torch.tensor([1.75])).item() == pytest.approx(1.5)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf"), 3.0])
def test_what_no_error_allows_has_infinite_margin(bad):
    interval = rounded_interval(torch.zeros(1).double(), torch.zeros(1).double(), BF16)
    assert interval.margin(torch.tensor([bad])).item() == float("inf")
    assert interval.margin(torch.zeros(1)).item() == 0.0


def test_overflow_admits_nan_and_infinities_but_no_other_number():
    exact, error = torch.ones(1).double(), torch.full((1,), 1e-3).double()
    interval = rounded_interval(exact, error, FP16, torch.tensor([True]))
    assert interval.margin(torch.tensor([float("nan")])).item() == 0.0
    assert interval.margin(torch.tensor([float("inf")])).item() == 0.0
    assert interval.margin(torch.tensor([2.0])).item() > 1


def test_infinite_exact_values_must_be_met_exactly():
    interval = rounded_interval(torch.tensor([-torch.inf]).double(), torch.zeros(1).double(), FP32)
    assert interval.margin(torch.tensor([-torch.inf])).item() == 0.0
    for wrong in (torch.inf, 0.0, float("nan"), -3e38):
        assert interval.margin(torch.tensor([wrong])).item() == float("inf")


def test_overflowing_output_format_accepts_infinity():
    interval = rounded_interval(torch.tensor([65519.0]).double(), torch.tensor([2.0]).double(), FP16)
    assert interval.accepts(torch.tensor([65504.0])).all()
    assert interval.accepts(torch.tensor([torch.inf])).all()
    assert not interval.accepts(torch.tensor([65000.0])).any()


def test_rounding_by_one_addition_is_rounding_to_nearest():
    """All binades, ties and subnormal values, both signs; to the bit but for the sign of zeros."""
    generator = torch.Generator().manual_seed(5)
    for fmt in FORMATS:
        significands = torch.randn(20_000, generator=generator).double()
        low = max(fmt.min_exponent - fmt.precision - 4, -1060)
        high = math.frexp(fmt.max_finite)[1] - 4
        exponents = torch.randint(low, high, significands.shape, generator=generator)
        numbers = torch.ldexp(significands, exponents)
        ties = (2 * torch.arange(-500, 500).double() + 1) * fmt.unit_roundoff
        x = torch.cat([numbers, 1 + ties, fmt.quantum * ties / (2 * fmt.unit_roundoff), torch.zeros(3)])
        x = x[x.abs() < fmt.max_finite]
        assert torch.equal(round_inside(x, fmt), round_nearest(x, fmt)), fmt
        again = x.clone()
        assert round_inside(again, fmt, out=again) is again
        assert torch.equal(again, round_nearest(x, fmt)), fmt


@pytest.mark.parametrize("size", [3, 1000])
def test_one_element_past_the_range_changes_no_other(size):
    """The short cut for what lies inside the format's range gives the same as the long way."""
    generator = torch.Generator().manual_seed(size)
    exact = 10 * torch.randn(size, generator=generator).double()
    error = torch.rand(size, generator=generator).double()
    short = rounded_interval(exact, error, FP16)
    past, unlimited = exact.clone(), error.clone()
    past[-1], unlimited[-2] = 65520.0, torch.inf
    long = rounded_interval(past, unlimited, FP16)
    for name in ("error", "lower", "upper", "may_overflow"):
        one, other = getattr(short, name)[:-2], getattr(long, name)[:-2]
        torch.testing.assert_close(one, other, rtol=1e-15, atol=0.0)
    assert long.upper[-1] == torch.inf
    assert bool(long.may_overflow[-2])
