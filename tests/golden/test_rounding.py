"""Balls to digits and bits: against numpy's roundings, Python's decimals, and exact rationals."""

from __future__ import annotations

import decimal as reference
import random
import struct

import flint
import pytest
import torch

from flashcheck.formats import BF16, FP16, FP32, FP64, round_nearest
from flashcheck.golden.patterns import from_hex, from_patterns, to_hex, to_patterns
from flashcheck.golden.rational import rounded
from flashcheck.golden.rounding import PATTERNS, Span, UndecidedError, decimal, pattern, width


@pytest.fixture(autouse=True)
def _precision() -> None:
    flint.ctx.prec = 200


def numbers(count: int) -> list[float]:
    rng = random.Random(0)
    ends = [2.0**e for e in (-1074, -1022, -149, -133, -126, -25, -24, -14, 0, 15, 16, 127)]
    edges = [x * y for x in ends for y in (1.0, 1.5, 1.25, 1 + 2.0**-11, 1 + 2.0**-12, 1 + 3 * 2.0**-12)]
    edges += [65504.0, 65519.999, 65520.0, 3.4028235e38, 3.4028236e38, 1e39]
    drawn = [rng.uniform(-1, 1) * 2.0 ** rng.randint(-160, 150) for _ in range(count)]
    return edges + [-x for x in edges] + drawn


def test_patterns_are_the_nearest_numbers() -> None:
    for x in numbers(300):
        span = Span.of(flint.arb(x))
        assert pattern(span, FP64) == struct.unpack("<Q", struct.pack("<d", x))[0]
        for fmt in (FP32, FP16, BF16):
            stored = round_nearest(torch.tensor([x], dtype=torch.float64), fmt).to(fmt.dtype)
            assert pattern(span, fmt) == to_patterns(stored, fmt)[0], (x, fmt)


def test_decimals_are_correctly_rounded() -> None:
    context = reference.Context(prec=30, rounding=reference.ROUND_HALF_EVEN)
    for x in numbers(300):
        text = decimal(Span.of(flint.arb(x)))
        assert reference.Decimal(text) == context.create_decimal_from_float(x), x
        assert not text.partition("e")[0].endswith("0") or len(text.partition("e")[0]) <= 2


def test_both_roundings_agree() -> None:
    both = 0
    for x in numbers(200):
        span = Span.of(flint.arb(x) / 3)
        for fmt in PATTERNS:
            codes = rounded(decimal(span), fmt)
            assert pattern(span, fmt) in codes, (x, fmt)
            both += len(codes) > 1
    assert both <= 8  # 1.5 times a power of two, divided by 3, may be a tie of subnormal numbers


def test_a_ball_across_a_boundary_is_undecided_unless_it_is_a_tie() -> None:
    middle = flint.arb(1 + 2.0**-8) + flint.arb(0, 2.0**-100)  # between two bf16 numbers
    with pytest.raises(UndecidedError):
        pattern(Span.of(middle), BF16)
    assert pattern(Span.of(middle, tie=True), BF16) == 0x3F80  # to even
    assert pattern(Span.of(flint.arb(1 + 2.0**-8)), BF16) == 0x3F80
    assert pattern(Span.of(flint.arb(1 + 2.0**-8 + 2.0**-40)), BF16) == 0x3F81
    with pytest.raises(UndecidedError):
        Span.of(flint.arb(0, 2.0**-100))
    assert rounded("1.00390625e0", BF16) == {0x3F80, 0x3F81}


def test_special_values() -> None:
    assert decimal(Span.of(flint.arb(0))) == "0"
    assert decimal(Span.of(flint.arb.neg_inf())) == "-inf"
    assert pattern(Span.of(flint.arb.neg_inf()), FP16) == 0xFC00
    assert decimal(Span.of(flint.arb.nan())) == "nan"
    for fmt in PATTERNS:
        bits = pattern(Span.of(flint.arb.nan()), fmt)
        assert bool(torch.isnan(from_patterns([bits], (1,), fmt).double()).all())
        assert rounded("nan", fmt) == {bits}


def test_exponents_that_no_float_has() -> None:
    tiny = (-(flint.arb(10) ** 38)).exp()
    # log10 e = 0.43429448190325182765112891891660508229439700580366656611445378...
    assert decimal(Span.of(tiny)).startswith(
        "3.63328461318138644835046540131e-434294481903251827651128918916605"
    )
    assert pattern(Span.of(tiny), FP64) == 0
    assert pattern(Span.of(1 / tiny), FP32) == 0x7F800000


def test_hex_round_trips() -> None:
    for fmt in PATTERNS:
        codes = [0, 1, (1 << width(fmt)) - 1, 1 << (width(fmt) - 1)]
        assert from_hex(to_hex(codes, width(fmt)), width(fmt)) == codes
        assert to_patterns(from_patterns(codes, (2, 2), fmt), fmt) == codes
    assert to_hex([0x3C00, 0x4000], 16) == "003c0040"
