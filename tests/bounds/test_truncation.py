"""Sums of products in units that cut addends off: the emulator's errors against what is predicted of them."""

from __future__ import annotations

import math

import pytest
import torch

from flashcheck.arithmetic import HOPPER_16BIT, HOPPER_FP8, IEEE_FP32
from flashcheck.bounds.truncation import DotProducts
from flashcheck.checks import Judged
from flashcheck.checks.rms import LARGEST_RATIO, RmsTally
from flashcheck.emulator.units import multiply_add
from flashcheck.formats import BF16, E4M3, E5M2, FP16, round_nearest
from flashcheck.loading import load
from tests.bounds.honest import normal, problem

UNITS = {
    "e5m2": (HOPPER_FP8, E5M2, E5M2),
    "bf16 and e5m2": (HOPPER_FP8, BF16, E5M2),
    "e4m3": (HOPPER_FP8, E4M3, E4M3),
    "bf16 and e4m3": (HOPPER_FP8, BF16, E4M3),
    "fp16": (HOPPER_16BIT, FP16, FP16),
}


def errors(unit, left, right, terms, mean):
    """(errors, the prediction) of sums of products of normal numbers with this mean."""
    a = round_nearest(normal((1, 1, 48, terms), 1) + mean, left)
    b = round_nearest(normal((1, 1, terms, 48), 2) + mean, right)
    exact = a @ b
    got = multiply_add(a.float(), b.float(), torch.zeros(1, 1, 48, 48), unit, left, other=right).double()
    dot = DotProducts(problem("bf16"), unit, a, b, exact)
    return got - exact, dot


@pytest.mark.parametrize("mean", [0.0, 0.5, 2.0])
@pytest.mark.parametrize("terms", [32, 160])
@pytest.mark.parametrize(("unit", "left", "right"), UNITS.values(), ids=UNITS)
def test_measured_over_predicted(unit, left, right, terms, mean):
    error, dot = errors(unit, left, right, terms, mean)
    bias = dot.bias()
    assert bias is not None
    ratio = float((error.square().mean() / (dot.variance() + bias.square()).mean()).sqrt())
    assert 0.4 <= ratio <= 1.45  # THEORY.md section 5; uniform shares of the largest addend: 0.2 to 5.3


def test_products_of_one_sign_lean_and_the_prediction_says_how_far():
    """Without the bias the error is many times what is predicted."""
    error, dot = errors(HOPPER_FP8, BF16, E5M2, 160, 2.0)
    bias = dot.bias()
    assert bias is not None
    assert float(error.mean() / bias.mean()) == pytest.approx(0.85, abs=0.25)
    assert float(error.square().mean().sqrt() / dot.variance().mean().sqrt()) > 4


def test_sums_that_are_rounded_to_nearest_do_not_lean():
    _, dot = errors(IEEE_FP32, BF16, BF16, 32, 2.0)
    assert dot.bias() is None


@pytest.mark.parametrize("name", ["emulator.hopper.flash.e5m2", "emulator.hopper.flash.e4m3"])
def test_gradients_that_are_left_of_what_cancels(name):
    """A gradient parallel to O and few keys: dP - delta cancels, what is left is the bias of dP's sums."""
    tally = RmsTally()
    for seed in range(4):
        fmt = name.rpartition(".")[2]
        p = problem(fmt, lengths=(31, 5), dim=160, seed=seed, scale=0.005)
        values = (p.v.double() * 0.05 + 2.0).to(p.v.dtype)
        dout = torch.full_like(p.dout, 1.0) + 0.1 * p.dout
        tally.add(Judged(load(name), p.replaced(v=values, dout=dout)).measured_gradients["dQ"])
    assert tally.ratio is not None
    assert 0.5 <= tally.ratio <= LARGEST_RATIO
    assert math.isfinite(tally.standard_error)
