"""Subnormal operands of units that align their addends: THEORY.md section 2.3."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from flashcheck.arithmetic import ARITHMETICS, HOPPER, HOPPER_16BIT, HOPPER_FP8
from flashcheck.bounds import centred, forward, gradient_sums, pairs
from flashcheck.bounds.alignment import operand, subnormal_error
from flashcheck.emulator.units import multiply_add
from flashcheck.formats import BF16, E4M3, E5M2, FP16, FP32, round_nearest
from flashcheck.inputs.spec import ProblemSpec
from flashcheck.loading import load
from flashcheck.problem import Problem
from tests.bounds.adversary import margins_of
from tests.bounds.honest import margins, normal, problem

PAIRS = {
    "e4m3": (HOPPER_FP8, E4M3, E4M3),
    "e5m2": (HOPPER_FP8, E5M2, E5M2),
    "e4m3 and bf16": (HOPPER_FP8, E4M3, BF16),
    "fp16": (HOPPER_16BIT, FP16, FP16),
}


@pytest.mark.parametrize("sizes", [(1.0, 1.0), (1.0, 0.0), (0.0, 0.0)], ids=["normal", "right low", "low"])
@pytest.mark.parametrize(("unit", "left", "right"), PAIRS.values(), ids=PAIRS)
def test_sums_of_products_stay_within_gamma_and_the_alignment(unit, left, right, sizes):
    """Sizes of 0 stand for subnormal numbers and zeros. float64 holds the exact sums: few, short products."""

    def drawn(shape, size, fmt, seed):
        scale = size or 4 * max(fmt.quantum, E4M3.quantum * 2.0**-3)
        return round_nearest(normal(shape, seed) * scale, fmt)

    a, b = drawn((64, 70), sizes[0], left, 1), drawn((70, 48), sizes[1], right, 2)
    exact, size = a @ b, a.abs() @ b.abs()
    got = multiply_add(a.float(), b.float(), torch.zeros(64, 48), unit, left, other=right).double()
    error = (got - exact).abs()
    known = unit.gamma(70) * size + unit.floor(70)
    extra = subnormal_error(unit, operand(a.abs(), left), operand(b.abs(), right), torch.matmul)
    assert bool((error <= known + extra).all())


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("unit", "fmt"), [(HOPPER_FP8, E4M3), (HOPPER_FP8, E5M2), (HOPPER_16BIT, FP16)])
def test_small_addends_are_lost_beside_a_subnormal_number(unit, fmt, transposed):
    """The largest addend is 2^8 eta and counts as 2^8 2^emin: all others are lost, more than gamma allows."""
    row = torch.full((1, unit.block), 2.0 ** (7 + fmt.min_exponent - unit.fraction_bits) / fmt.quantum)
    row = round_nearest(row.double().clamp(max=1.0) * (1 - fmt.unit_roundoff * 2), fmt)
    row[0, 0] = 2.0**8
    column = torch.full((unit.block, 1), fmt.quantum, dtype=torch.float64)
    a, b = (column.mT, row.mT) if transposed else (row, column)
    exact = float(a @ b)
    got = multiply_add(a.float(), b.float(), torch.zeros(1, 1), unit, fmt)
    known = unit.gamma(unit.block) * exact
    extra = subnormal_error(unit, operand(a, fmt), operand(b, fmt), torch.matmul)
    assert known < abs(float(got) - exact) <= known + float(extra)


@pytest.mark.parametrize("tile", [1, 3, 16, 33])
@pytest.mark.parametrize("unit", [HOPPER_FP8, HOPPER_16BIT], ids=["fp8", "16 bits"])
def test_every_tile_begins_a_step(unit, tile):
    """Tiles that end amid a step need more steps than a sum without tiles: each can lose an addend under the
    last bit of the sum."""
    fmt = E4M3 if unit is HOPPER_FP8 else BF16
    a = torch.full((1, 99), 2.0 ** (7 - unit.precision) * (2 - 2 * fmt.unit_roundoff) / 2**-4)
    b = torch.full((99, 1), 2.0**-4)
    a[0, 0], b[0, 0] = 1.0, 2.0**7
    assert torch.equal(a.double(), round_nearest(a.double(), fmt))
    got = torch.zeros(1, 1)
    for first in range(0, 99, tile):
        keys = slice(first, first + tile)
        got = multiply_add(a[:, keys], b[keys], got, unit, fmt)
    exact = float(a.double() @ b.double())
    share = abs(float(got) - exact) / exact
    assert share <= unit.gamma(99, tile)
    if tile == 1 and unit is HOPPER_16BIT:
        assert share > unit.gamma(99)


def test_full_tiles_cost_no_more():
    assert HOPPER_FP8.gamma(640, 64) == HOPPER_FP8.gamma(640)
    assert HOPPER_FP8.gamma(64, 8, 8) > HOPPER_FP8.gamma(64)


KINDS = {
    "tiny gradients": {"gradient": 2.0**-10},
    "huge gradients": {"gradient": 2.0**12},
    "subnormal values": {"sizes": (1.0, 1.0, 0.0)},
    "subnormal keys": {"sizes": (1.0, 0.0, 1.0)},
    "everything subnormal": {"sizes": (0.0, 0.0, 0.0), "gradient": 2.0**-10},
    "spread weights": {"sizes": (3.0, 3.0, 1.0), "gradient": 2.0**8},
    "scale 0": {"scale": 0.0},
    "scale 0, subnormal values": {"scale": 0.0, "sizes": (1.0, 1.0, 0.0)},
}


def _problem(fmt, *, gradient=1.0, sizes=(1.0, 1.0, 1.0), own_gradient=False, **options):
    sizes = tuple(size or 3 * fmt.quantum for size in sizes)
    made = problem(fmt.name, heads=(2, 1), lengths=(9, 40), seed=3, sizes=sizes, **options)
    dtype = fmt.dtype if own_gradient else made.dout.dtype
    return made.replaced(dout=(made.dout.double() * gradient).clamp(-400, 400).to(dtype))


@pytest.mark.parametrize("own_gradient", [False, True], ids=["dO wider", "dO in the format"])
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("preset", ["flash.e4m3", "flash.e5m2", "flash.fp16"])
def test_honest_kernels_with_subnormal_operands_stay_inside(preset, kind, own_gradient):
    arithmetic = ARITHMETICS[preset]
    worst = margins(_problem(arithmetic.input_format, own_gradient=own_gradient, **kind), arithmetic, HOPPER)
    assert max(worst.values()) <= 1, worst


def _without(monkeypatch):
    for module, name in (
        (forward, "subnormal_values"),
        (centred, "subnormal_values"),
        (pairs, "subnormal_error"),
        (gradient_sums, "subnormal_error"),
    ):
        monkeypatch.setattr(module, name, lambda *_: 0.0)


def _one_strong_key():
    """P is 256 once and 0.2344 for all other keys, or for all other rows (dV), beside subnormal V (dO).

    The bias makes the scores: those of an fp8 product err by more than what is looked for.
    """
    n = 32
    bias = torch.full((1, 1, n, n), -7.0)
    bias[..., 0, 0] = bias[..., 1:, 1] = 0.0
    zero = torch.zeros(1, 1, n, 1, dtype=E4M3.dtype)
    low = torch.full((1, 1, n, 4), E4M3.quantum).to(E4M3.dtype)
    return Problem(zero, zero, low, bias=bias, dout=low)


def test_the_terms_are_needed(monkeypatch):
    arithmetic = replace(ARITHMETICS["flash.e4m3"], output_format=FP32)
    made = _one_strong_key()
    assert max(margins(made, arithmetic, HOPPER).values()) <= 1
    _without(monkeypatch)
    worst = margins(made, arithmetic, HOPPER)
    assert worst["out.C"] > 1
    assert worst["dv.C"] > 1


FOUND = (
    ProblemSpec(
        dtype="e4m3",
        num_heads=6,
        num_kv_heads=3,
        num_queries=12,
        num_keys=16,
        head_dim=8,
        value_dim=192,
        scale=1.0,
        causal="top_left",
        mask="keys",
        bias="hk",
        softcap=50.0,
        sink="low",
        segments=((4, 8), (0, 0), (8, 8)),
        family="constant_v",
        gradient="tiny",
        seed=1900,
    ),
    ProblemSpec(
        dtype="e4m3",
        num_heads=8,
        num_kv_heads=2,
        num_queries=1,
        num_keys=8,
        head_dim=128,
        value_dim=32,
        scale=0.0,
        causal="top_left",
        bias="bhqk",
        sink="high",
        segments=((0, 4), (0, 0), (1, 4)),
        family="mixed_rows",
        gradient="parallel",
        seed=273,
    ),
)


@pytest.mark.parametrize("spec", FOUND, ids=["tiny", "scale 0"])
def test_an_output_gradient_wider_than_the_inputs_keeps_its_own_exponents(spec):
    """Found by the adversary: a bf16 dO was aligned as if it were e4m3."""
    worst = margins_of(load("emulator.hopper.flash.e4m3"), spec)
    assert max(worst.values()) <= 1, worst


def test_probabilities_that_may_overflow_by_their_exponents_error_may_be_nan():
    """Found by the adversary: fp8 logits of 10^8 err by thousands, exp overflows, inf times 0 is NaN."""
    spec = ProblemSpec(
        dtype="e5m2",
        num_heads=8,
        num_kv_heads=2,
        num_queries=7,
        num_keys=16,
        head_dim=96,
        value_dim=64,
        causal="top_left",
        window=(None, 2),
        mask="holes",
        bias="k",
        sink=True,
        segments=((2, 8), (0, 0), (5, 8)),
        family="extreme_logits",
        gradient="one_row",
        seed=1,
    )
    worst = margins_of(load("emulator.hopper.flash.e5m2"), spec)
    assert max(worst.values()) <= 1, worst
