"""Honest emulators meet the predicted rms errors of O and of the gradients."""

from __future__ import annotations

import pytest

from flashcheck.checks import Judged
from flashcheck.checks.rms import LARGEST_RATIO, RmsTally
from flashcheck.loading import load
from tests.bounds.honest import problem

KERNELS = (
    "emulator.flash.bf16",
    "emulator.flash.e4m3",
    "emulator.hopper.flash.fp16",
    "emulator.hopper.flash.e4m3",
)
OPTIONS: dict[str, dict[str, object]] = {
    "plain": {},
    "softcap": {"softcap": 1.0},
    "grouped causal": {"heads": (4, 2), "causal": "bottom_right"},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("name", KERNELS)
def test_measured_over_predicted(name, options):
    tallies = {tensor: RmsTally() for tensor in ("O", "dQ", "dK", "dV")}
    fmt = name.rpartition(".")[2]
    for seed in range(3):
        judged = Judged(load(name), problem(fmt, lengths=(64, 96), dim=32, seed=seed, **options))
        for tensor, measured in (judged.measured | judged.measured_gradients).items():
            if tensor in tallies:
                tallies[tensor].add(measured)
    ratios = {tensor: tally.ratio or 0.0 for tensor, tally in tallies.items()}
    assert max(ratios.values()) <= LARGEST_RATIO, ratios
    assert min(ratios.values()) >= 1 / LARGEST_RATIO, ratios


@pytest.mark.parametrize("name", KERNELS)
def test_rows_that_share_every_rounding(name):
    """With scale 0 all of P is one number, and so is its error: dV is off by it times the sum of dO. The few
    independent elements say little about 1.1, but a prediction from independent errors is off by 1.3 to 8."""
    tally = RmsTally()
    for seed in range(4):
        p = problem(name.rpartition(".")[2], lengths=(64, 96), dim=64, seed=seed, scale=0.0)
        tally.add(Judged(load(name), p).measured_gradients["dV"])
    assert tally.ratio is not None
    assert 0.8 < tally.ratio < 1.25
    assert not tally.too_large
