"""Double-double operations against mpmath at 400 bits: always inside the claimed error."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import mpmath
import pytest
import torch

from flashcheck.oracle import twofold
from flashcheck.oracle.common_unit import product_is_exact
from flashcheck.oracle.twofold import Twofold

CTX = mpmath.MPContext()
CTX.prec = 400
COUNT = 400


def exactly(x: Twofold) -> list[Any]:
    pairs = zip(x.hi.flatten().tolist(), x.lo.flatten().tolist(), strict=True)
    return [CTX.mpf(hi) + CTX.mpf(lo) for hi, lo in pairs]


def random_twofold(seed: int, smallest: float, largest: float) -> Twofold:
    """Signs and magnitudes log-uniform; low halves of every relative size, zero and half an ulp included."""
    gen = torch.Generator().manual_seed(seed)
    exponent = smallest + (largest - smallest) * torch.rand(COUNT, generator=gen, dtype=torch.float64)
    hi = torch.exp2(exponent) * (1 - 2 * (torch.rand(COUNT, generator=gen) < 0.5).double())
    depth = torch.randint(0, 60, (COUNT,), generator=gen).double()
    lo = hi * torch.rand(COUNT, generator=gen, dtype=torch.float64) * torch.exp2(-53 - depth)
    lo[::7] = 0.0
    return Twofold(*twofold.fast_two_sum(hi, lo))


def worst(got: Twofold, expected: list[Any], scale: Callable[[Any], Any]) -> float:
    """Largest |got - expected| / scale(expected)."""
    pairs = zip(exactly(got), expected, strict=True)
    return max(float(abs(g - e) / scale(e)) for g, e in pairs if scale(e))


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("name", ["add", "near cancellation", "mul", "div", "times_float"])
def test_operations(name: str, seed: int) -> None:
    a, b = random_twofold(seed, -30, 30), random_twofold(seed + 100, -30, 30)
    if name == "near cancellation":
        b = Twofold(-a.hi * (1 + 2.0**-52), b.lo * 1e-20)
        b = Twofold(*twofold.fast_two_sum(b.hi, b.lo))
    exact_a, exact_b = exactly(a), exactly(b)
    pairs = list(zip(exact_a, exact_b, strict=True))
    if name in ("add", "near cancellation"):
        got, expected = a + b, [x + y for x, y in pairs]
    elif name == "mul":
        got, expected = a * b, [x * y for x, y in pairs]
    elif name == "div":
        got, expected = a / b, [x / y for x, y in pairs]
    else:
        highs = exactly(Twofold.of(b.hi))
        got, expected = twofold.times_float(a, b.hi), [x * y for x, y in zip(exact_a, highs, strict=True)]
    assert worst(got, expected, abs) <= twofold.OPERATION


@pytest.mark.parametrize("largest", [-40, 0, 5, 9.3])
def test_exp(largest: float) -> None:
    x = random_twofold(3, largest - 9, largest)
    x = x.where(x.hi.abs() < 660)  # beyond it the low half may underflow
    assert worst(twofold.exp(x), [CTX.exp(e) for e in exactly(x)], abs) <= twofold.EXP


def test_exp_at_the_ends_of_the_range() -> None:
    x = Twofold.of(torch.tensor([-torch.inf, -1e300, -746.5, -744.0, -720.0, 0.0, 709.0, 711.0]).double())
    got = twofold.exp(x)
    assert got.hi[:3].tolist() == [0.0, 0.0, 0.0]
    assert got.hi[5].item() == 1.0
    assert got.lo[5].item() == 0.0
    assert got.hi[7].item() == torch.inf
    expected = [CTX.exp(e) for e in exactly(x)[3:5]]
    assert worst(got.map(lambda t: t[3:5]), expected, lambda _: twofold.UNDERFLOW) <= 1.0


@pytest.mark.parametrize("largest", [0.0, 12.0, 900.0])
def test_log(largest: float) -> None:
    x = random_twofold(4, -largest - 1, largest)
    x = x.scaled(torch.sign(x.hi))
    got, expected = twofold.log(x), [CTX.log(e) for e in exactly(x)]
    claimed = worst(got, expected, lambda e: twofold.LOG_ABSOLUTE + twofold.OPERATION * abs(e))
    assert claimed <= 1.0


@pytest.mark.parametrize("largest", [-50, -3, 1, 8])
def test_tanh_and_sech2(largest: float) -> None:
    x = random_twofold(5, largest - 8, largest)
    expected = [CTX.tanh(e) for e in exactly(x)]
    assert worst(twofold.tanh(x), expected, lambda _: twofold.TANH_ABSOLUTE) <= 1.0
    x = x.where(x.hi.abs() < 320)
    expected = [CTX.cosh(e) ** -2 for e in exactly(x)]
    assert worst(twofold.sech2(x), expected, abs) <= twofold.SECH2


@pytest.mark.parametrize("terms", [0, 1, 2, 3, 17, 100])
def test_sums_and_products(terms: int) -> None:
    gen = torch.Generator().manual_seed(terms)
    a = torch.randn(3, terms, generator=gen, dtype=torch.float64) * 2.0**30
    b = torch.randn(terms, 2, generator=gen, dtype=torch.float64)
    twofold_b = Twofold(b, b * 2.0**-54)
    for right in (b, twofold_b):
        got = exactly(twofold.matmul(a, right))
        whole = exactly(right if isinstance(right, Twofold) else Twofold.of(right))
        for place, value in enumerate(got):
            i, j = divmod(place, 2)
            products = [CTX.mpf(a[i, n].item()) * whole[2 * n + j] for n in range(terms)]
            magnitude = CTX.fsum(abs(x) for x in products)
            assert abs(value - CTX.fsum(products)) <= twofold.ACCUMULATE * (terms + 1) * magnitude
    summed = exactly(twofold.total(twofold_b, 0))
    for j, value in enumerate(summed):
        column = exactly(twofold_b.map(lambda t: t[:, j]))  # noqa: B023
        magnitude = CTX.fsum(abs(x) for x in column)
        assert abs(value - CTX.fsum(column)) <= twofold.ACCUMULATE * terms * magnitude


@pytest.mark.parametrize("bits", [8, 11, 26, 53])
def test_a_product_counts_as_exact_only_where_float64_holds_every_partial_sum(bits: int) -> None:
    gen = torch.Generator().manual_seed(bits)
    least, past = 1 - 2**bits, 2**bits
    a = torch.randint(least, past, (5, 40), generator=gen).double()
    b = torch.randint(least, past, (40, 7), generator=gen).double()
    assert product_is_exact(a, b) == (bits < 26)
    got = exactly(twofold.matmul(a, b))
    for place, value in enumerate(got):
        i, j = divmod(place, 7)
        exact = sum(int(x) * int(y) for x, y in zip(a[i], b[:, j], strict=True))
        if bits < 26:
            assert value == exact
            assert float(a[i] @ b[:, j]) == exact


@pytest.mark.parametrize("entry", [2.0**-60, 1e-310, math.nan, math.inf])
def test_one_entry_of_another_size_ends_that(entry: float) -> None:
    a, b = torch.ones(3, 4, dtype=torch.float64), torch.ones(4, 2, dtype=torch.float64)
    assert product_is_exact(a, b)
    a[1, 2] = entry
    assert not product_is_exact(a, b)


def test_float64_functions_meet_their_assumed_error() -> None:
    """The two ulp that the float64 rung's bound assumes of torch's exp, log, tanh and cosh."""
    x = random_twofold(6, -20, 9).hi
    u = 2.0**-53
    for name, relative, domain in (
        ("exp", 4 * u, x[x.abs() < 700]),
        ("log", 4 * u, x.abs()),
        ("tanh", 4 * u, x),
        ("cosh", 4 * u, x[x.abs() < 700]),
    ):
        got = Twofold.of(getattr(torch, name)(domain))
        expected = [getattr(CTX, name)(e) for e in exactly(Twofold.of(domain))]
        assert worst(got, expected, abs) <= relative, name
