"""torch lacks many operations for 8-bit tensors: every check, on every option, does without them."""

from __future__ import annotations

from typing import Any

import pytest

from flashcheck.inputs.spec import ProblemSpec
from flashcheck.loading import load
from tests.checks.test_nothing import failures

OPTIONS: list[dict[str, Any]] = [
    {"key_lengths": (12, 5), "causal": "top_left", "bias": "bhqk"},
    {"mask": "holes", "alibi": "batch", "sink": "high"},
    {"window": (3, 0), "softcap": 2.0, "scale": -0.125},
    {"batch": 1, "segments": ((4, 0), (0, 3), (5, 12))},
    {"num_heads": 4, "causal": "bottom_right", "gradient": "tiny"},
]


@pytest.mark.parametrize(("number", "options"), list(enumerate(OPTIONS)), ids=str)
def test_every_check_takes_eight_bits(number: int, options: dict[str, Any]) -> None:
    dtype = ("e4m3", "e5m2")[number % 2]
    sizes = {"batch": 2, "num_heads": 2, "num_kv_heads": 2, "num_queries": 9, "num_keys": 15}
    spec = ProblemSpec(dtype=dtype, seed=4, **(sizes | options))
    assert failures(load(f"emulator.flash.{dtype}"), spec.build()) == []
