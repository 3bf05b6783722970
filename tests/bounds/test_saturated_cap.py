"""Where a cap is saturated and a row sees one key, all that is left of dS is the product of two errors."""

from __future__ import annotations

import pytest

from flashcheck.checks import Judged
from flashcheck.checks.rms import RmsTally
from flashcheck.inputs.spec import ProblemSpec
from flashcheck.loading import load

KERNELS = [
    "emulator.hopper.eager.bf16",
    "emulator.eager.bf16",
    "emulator.hopper.flash.bf16",
    "emulator.flash.fp16",
]


@pytest.mark.parametrize("scale", [1.0, 4.0, 16.0])
@pytest.mark.parametrize("name", KERNELS)
def test_gradients_are_no_larger_than_predicted(name: str, scale: float) -> None:
    tallies = {"dQ": RmsTally(), "dK": RmsTally()}
    for seed in range(4):
        spec = ProblemSpec(
            dtype=name[-4:],
            num_heads=4,
            num_kv_heads=4,
            num_queries=33,
            num_keys=33,
            head_dim=64,
            value_dim=64,
            scale=scale,
            softcap=0.5,
            causal="top_left",
            window=(0, 0),
            seed=seed,
        )
        measured = Judged(load(name), spec.build()).measured_gradients
        for tensor, tally in tallies.items():
            tally.add(measured[tensor])
    assert all(tally.ratio is not None and tally.ratio < 1.1 for tally in tallies.values())
