"""An honest emulator stays inside every bound: forward, backward, and end to end."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from flashcheck.arithmetic import ARITHMETICS, HOPPER, IEEE, flash
from flashcheck.formats import BF16, FP16
from tests.bounds.honest import margins, normal, problem

OPTIONS: dict[str, dict[str, object]] = {
    "plain": {},
    "causal": {"causal": "bottom_right"},
    "grouped": {"heads": (4, 2)},
    "dlse": {"dlse": True},
    "softcap": {"softcap": 2.0},
    "sink bias alibi": {
        "heads": (2, 2),
        "sink": torch.tensor([0.5, -1.0]),
        "bias": normal((1, 2, 24, 80), 7).float(),
        "alibi_slopes": torch.tensor([0.25, 0.0625]),
    },
    "window": {"window": (3, 2)},
    "huge logits": {"sizes": (30.0, 30.0, 1.0)},
    "large values": {"sizes": (1.0, 1.0, 1e4)},
    "offset scores": {"sizes": (1.0, 1.0, 1.0), "scale": -0.5},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("machine", [IEEE, HOPPER], ids=lambda m: m.name)
@pytest.mark.parametrize("preset", ["flash.bf16", "flash.fp16", "flash.e4m3", "flash.fp32", "eager.bf16"])
def test_presets(preset, machine, options):
    arithmetic = ARITHMETICS[preset]
    worst = margins(problem(arithmetic.input_format.name, seed=1, **options), arithmetic, machine)
    assert max(worst.values()) <= 1, worst
    assert {"out", "lse", "dq", "dk", "dv"} <= set(worst)


VARIANTS = {
    "descending": {"order": "descending", "block_keys": 32},
    "subtract first": {"scale_placement": "exponent_subtract_first", "block_keys": 16},
    "rounded row sum": {"row_sum": "rounded", "block_keys": 32},
    "lazy rescaling": {"rescale_threshold": 8.0, "block_keys": 16},
    "splits": {"splits": 2, "block_keys": 16},
    "fp16 scores": {"score_format": FP16},
    "narrow gradient sums": {"grad_accumulator_format": BF16, "group_grad_format": BF16},
    "softmax first, P taken again": {
        "normalise": "before_product",
        "backward_probability": "recomputed",
        "grad_score_format": ARITHMETICS["flash.fp32"].probability_format,
        "scaled_grad_score_format": BF16,
    },
    "narrow delta": {"delta_format": BF16},
    "dS of a rounded P": {
        "grad_score_format": ARITHMETICS["flash.fp32"].probability_format,
        "scaled_grad_score_format": BF16,
        "grad_score_probability": "rounded",
    },
    "own exponentials": {"exp_error": 2.0**-12, "backward_exp_error": 2.0**-20, "exp_flush": 2.0**-60},
    "scale 448": {
        "probability_format": ARITHMETICS["flash.e4m3"].probability_format,
        "probability_scale": 448.0,
    },
}
LIFTS = {
    "e4m3": {"probability_format": ARITHMETICS["flash.e4m3"].probability_format, "probability_scale": 256.0},
    "e4m3, split": {
        "probability_format": ARITHMETICS["flash.e4m3"].probability_format,
        "probability_scale": 256.0,
        "splits": 2,
    },
    "far": {"probability_scale": 2.0**100},
}
LIFTED_OPTIONS = {
    name: {**OPTIONS[name], "heads": (2, 1)} for name in ("plain", "causal", "huge logits", "offset scores")
} | {
    # Under the maximum by less than the lift of 5.5: the sink takes over from it.
    "sinks": {"heads": (2, 1), "sizes": (2.0, 1.5, 1.0), "sink": torch.tensor([0.5, 2.0])},
    "sink above": {"heads": (2, 1), "sink": torch.tensor([30.0, 90.0])},
}


@pytest.mark.parametrize("options", LIFTED_OPTIONS.values(), ids=LIFTED_OPTIONS)
@pytest.mark.parametrize("changes", LIFTS.values(), ids=LIFTS)
@pytest.mark.parametrize("machine", [IEEE, HOPPER], ids=lambda m: m.name)
def test_a_lifted_exponent(machine, changes, options):
    tiled = {"block_keys": 16, "order": "ascending", "probability_scale_placement": "exponent"}
    for seed in (1, 2):
        for position in ("first", "last"):
            arithmetic = replace(flash(BF16), **{**tiled, **changes}, sink_position=position)
            worst = margins(problem(seed=seed, **options), arithmetic, machine)
            assert max(worst.values()) <= 1, worst


@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS)
def test_variants(changes):
    arithmetic = replace(flash(BF16), **changes)
    for seed in (1, 2):
        worst = margins(problem(heads=(2, 1), seed=seed, sizes=(2.0, 2.0, 1.0)), arithmetic, IEEE)
        assert max(worst.values()) <= 1, worst


def test_a_wrong_result_is_outside():
    """The margins of this file can fail: the same run judged without its P rounding is rejected."""
    arithmetic = replace(flash(BF16), output_format=ARITHMETICS["flash.fp32"].output_format)
    judge = replace(arithmetic, probability_format=ARITHMETICS["flash.fp32"].probability_format)
    worst = margins(problem(seed=1), arithmetic, IEEE, (judge, IEEE))
    assert worst["out"] > 1
    assert worst["dv"] > 1
