"""Planted errors of casts and functions come out as planted."""

import math
from itertools import pairwise

import pytest
import torch

from flashcheck.formats import BF16, E4M3, FP16, FP32, round_nearest, round_toward_zero
from flashcheck.probe import casts, functions
from flashcheck.probe.arguments import Arguments
from tests.probe.emulated import CPU

FEW = Arguments(32)


@pytest.fixture
def planted_cast(monkeypatch):
    def plant(rounded):
        monkeypatch.setattr(casts, "cast", lambda x, fmt, *_: rounded(x.double(), fmt))

    return plant


def test_nearest_and_truncating_casts_are_told_apart(planted_cast):
    planted_cast(round_nearest)
    right = casts.measure_cast(BF16, "torch", FEW, CPU)
    assert (right.rounding, right.wrong, right.overflow, right.nan_kept) == (
        "nearest even",
        0,
        "infinity",
        True,
    )
    planted_cast(round_toward_zero)
    truncated = casts.measure_cast(BF16, "torch", FEW, CPU)
    assert truncated.rounding == "toward zero"
    assert truncated.wrong > truncated.tested / 4
    assert truncated.overflow == "saturates"
    assert "gives" in truncated.example


def test_ties_away_from_zero_are_neither(planted_cast):
    planted_cast(lambda x, fmt: round_nearest(x * (1 + 2.0**-30), fmt))
    assert casts.measure_cast(FP16, "torch", FEW, CPU).rounding == "other"


def test_one_wrong_value_is_found(planted_cast):
    planted_cast(lambda x, fmt: torch.where(x == 1.0, 1.125, round_nearest(x, fmt)))
    found = casts.measure_cast(E4M3, "torch", FEW, CPU)
    assert found.wrong >= 1
    assert found.example == f"{(1.0).hex()} gives {(1.125).hex()}, not {(1.0).hex()}"


@pytest.mark.parametrize("platform", ["torch", "triton"])
def test_fp16_casts_are_right_here(platform):
    assert casts.measure_cast(FP16, platform, FEW, CPU).rounding == "nearest even"


@pytest.mark.parametrize("relative", [2.0**-22, 2.0**-18])
def test_a_relative_error_is_measured(monkeypatch, relative):
    exact = functions.FUNCTIONS["exp2"]
    monkeypatch.setattr(
        functions, "evaluate", lambda _f, _p, x, *_: (torch.exp2(x.double()) * (1 + relative)).float()
    )
    found = functions.measure_function(exact, "torch", FEW, CPU)
    assert found.relative == pytest.approx(relative * 2**24, abs=1.01)  # and one rounding to fp32
    assert found.bias == pytest.approx(relative * 2**24, rel=0.05)
    assert found.flush == 0.0


def test_a_flush_limit_is_measured(monkeypatch):
    def flushed(_function, _platform, x, _numerator=None):
        y = torch.exp2(x)
        return torch.where(y < 2.0**-126, 0.0, y)

    monkeypatch.setattr(functions, "evaluate", flushed)
    found = functions.measure_function(functions.FUNCTIONS["exp2"], "torch", Arguments(256), CPU)
    assert 2.0**-127 < found.flush < 2.0**-126
    assert found.relative < 2  # results that were flushed are no relative errors


def test_special_values_are_reported(monkeypatch):
    monkeypatch.setattr(functions, "evaluate", lambda _f, _p, x, *_: torch.exp2(x).nan_to_num(5.0))
    found = functions.measure_function(functions.FUNCTIONS["exp2"], "torch", FEW, CPU)
    assert found.special["nan"] == "5"


@pytest.mark.parametrize("platform", ["torch", "triton"])
@pytest.mark.parametrize("name", ["exp2", "log", "division", "reciprocal"])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_functions_of_this_machine_are_libm_grade(name, platform):
    """numpy, which the interpreter computes with, promises 4 ulp."""
    found = functions.measure_function(functions.FUNCTIONS[name], platform, FEW, CPU)
    assert not found.failed
    assert found.ulps <= 4
    assert found.tested == FEW.count


def test_every_argument_class_is_sampled():
    (x,) = FEW.chunks(CPU)
    assert x.numel() == FEW.count
    for holds in (torch.isnan(x), torch.isinf(x), x == 0, (x != 0) & (x.abs() < 2.0**-126), x == 1.0):
        assert bool(holds.any())
    assert len(set(torch.frexp(x[torch.isfinite(x) & (x != 0)]).exponent.tolist())) > 250


def test_exhaustive_arguments_are_all_of_them(monkeypatch):
    """The chunks of a GPU run, on a few codes of each: contiguous, ends included."""
    starts = []
    monkeypatch.setattr(torch, "arange", lambda a, b, **_: starts.append((a, b)) or torch.zeros(1024))
    for _ in Arguments(None).chunks(CPU):
        pass
    assert starts[0][0] == -(2**31)
    assert starts[-1][1] == 2**31
    assert all(end == start for (_, end), (start, _) in pairwise(starts))


def test_addition_and_fused_products():
    found = functions.measure_addition("triton", CPU)
    assert (found.addition, found.subnormal_sums) == ("nearest even", "kept")
    assert math.isfinite(FP32.max_finite)
    assert found.fused is not None


def test_a_nan_is_an_infinite_error(monkeypatch):
    monkeypatch.setattr(
        functions, "evaluate", lambda _f, _p, x, *_: torch.where(x == 1.5, torch.nan, torch.exp2(x))
    )
    found = functions.measure_function(functions.FUNCTIONS["exp2"], "torch", FEW, CPU)
    assert found.relative == math.inf
    assert float.fromhex(found.at) == 1.5
