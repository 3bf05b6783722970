"""Sums round where their unit says: against exact rational arithmetic, one scalar at a time."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch
from torch import Tensor

from flashcheck.arithmetic import HOPPER_16BIT, HOPPER_FP8, IEEE_FP32, Accumulator
from flashcheck.emulator.units import add_up, multiply_add
from flashcheck.formats import BF16, E4M3, FP16, FP32, Format, round_nearest


def exponent(x: Fraction) -> int:
    e = 0
    while abs(x) >= Fraction(2) ** (e + 1):
        e += 1
    while abs(x) < Fraction(2) ** e:
        e -= 1
    return e


def truncated(x: Fraction, spacing: Fraction) -> Fraction:
    return (abs(x) // spacing) * spacing * (1 if x >= 0 else -1)


def scalar_unit(a: list[float], b: list[float], start: float, unit: Accumulator, fmt: Format) -> float:
    """start + a . b by the rule of THEORY.md section 2.3, in rational arithmetic."""
    total = Fraction(start)
    for first in range(0, len(a), unit.block):
        pairs = [
            (Fraction(x), Fraction(y))
            for x, y in zip(a[first : first + unit.block], b[first : first + unit.block], strict=True)
        ]
        largest = max(
            [
                max(exponent(x), fmt.min_exponent) + max(exponent(y), fmt.min_exponent)
                for x, y in pairs
                if x * y
            ]
            + ([max(exponent(total), -126)] if total else []),
            default=0,
        )
        assert unit.fraction_bits is not None
        spacing = Fraction(2) ** (largest - unit.fraction_bits)
        total = sum((truncated(x * y, spacing) for x, y in pairs), truncated(total, spacing))
        if total:
            keep = Fraction(2) ** (max(exponent(total), -126) - unit.precision + 1)
            total = truncated(total, keep)
    return float(total)


def values(shape: tuple[int, ...], fmt: Format, spread: float, seed: int) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=g, dtype=torch.float64)
    x = x * torch.exp2(torch.randn(shape, generator=g, dtype=torch.float64) * spread)
    return round_nearest(x, fmt).float()


@pytest.mark.parametrize(
    ("unit", "fmt"), [(HOPPER_16BIT, BF16), (HOPPER_16BIT, FP16), (HOPPER_FP8, E4M3)], ids=str
)
@pytest.mark.parametrize("spread", [1.0, 6.0])
def test_block_units_agree_with_rational_arithmetic(unit: Accumulator, fmt: Format, spread: float) -> None:
    a, b = values((3, 70), fmt, spread, 1), values((70, 2), fmt, spread, 2)
    a[0, ::5] = 0.0
    start = values((3, 2), Format("stored", unit.precision, -126, 1e38, False, torch.float32), spread, 3)
    got = multiply_add(a, b, start, unit, fmt)
    for i in range(3):
        for j in range(2):
            want = scalar_unit(a[i].tolist(), b[:, j].tolist(), float(start[i, j]), unit, fmt)
            assert float(got[i, j]) == want


def test_hopper_keeps_two_bits_beyond_fp32_and_truncates() -> None:
    """1 + 1.5 * 2^-23 gives 1 + 2^-23, both signs: measured on the device."""
    for sign in (1.0, -1.0):
        a = torch.tensor([[1.0, 1.5 * 2.0**-23]]) * sign
        got = multiply_add(a, torch.ones(2, 1), torch.zeros(1, 1), HOPPER_16BIT, BF16)
        assert float(got) == sign * (1 + 2.0**-23)


def test_ieee_unit_rounds_after_every_product() -> None:
    a, b = values((4, 40), FP32, 3.0, 1), values((40, 3), FP32, 3.0, 2)
    want = torch.zeros(4, 3)
    for k in range(40):
        want = want + a[:, k : k + 1] * b[k]
    assert torch.equal(multiply_add(a, b, torch.zeros(4, 3), IEEE_FP32), want)


def test_the_order_of_a_sum_is_that_of_its_terms() -> None:
    x = torch.tensor([2.0**24, 1.0, 1.0])
    zero = torch.zeros(())
    assert float(add_up(x, zero, IEEE_FP32)) == 2.0**24
    assert float(add_up(x.flip(0), zero, IEEE_FP32)) == 2.0**24 + 2


@pytest.mark.parametrize("unit", [IEEE_FP32, HOPPER_16BIT], ids=["ieee", "hopper"])
def test_pairs_not_seen_are_skipped_and_others_carry_their_nan(unit: Accumulator) -> None:
    a = torch.tensor([[0.0, 1.0], [0.0, 1.0]])
    b = torch.tensor([[torch.nan], [2.0]])
    seen = torch.tensor([[False, True], [True, True]])
    got = multiply_add(a, b, torch.zeros(2, 1), unit, BF16, seen)
    assert float(got[0]) == 2.0
    assert torch.isnan(got[1]).all()


@pytest.mark.parametrize("unit", [IEEE_FP32, HOPPER_16BIT], ids=["ieee", "hopper"])
def test_overflow_is_infinite(unit: Accumulator) -> None:
    big = torch.tensor([[3e38, 3e38]])
    assert float(multiply_add(big, torch.ones(2, 1), torch.zeros(1, 1), unit, FP32)) == torch.inf


def test_rows_may_be_cut_anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    from flashcheck.emulator import units

    a, b = values((2, 9, 32), BF16, 2.0, 1), values((2, 32, 5), BF16, 2.0, 2)
    whole = multiply_add(a, b, torch.zeros(2, 9, 5), HOPPER_16BIT, BF16)
    monkeypatch.setattr(units, "_STEP_ELEMENTS", 700)
    assert torch.equal(multiply_add(a, b, torch.zeros(2, 9, 5), HOPPER_16BIT, BF16), whole)
