"""One bug is one finding, whichever check, tensor and problem shows it."""

from __future__ import annotations

import pytest

from flashcheck.checks import Judged
from flashcheck.checks.diagnose import diagnose
from flashcheck.fuzz.group_counts import groups_of
from flashcheck.inputs.spec import ProblemSpec
from tests.fuzz import subjects


@pytest.mark.parametrize("name", ["scale-wrong", "bwd-dq-scaled-twice", "window-one-short"])
def test_one_seeded_fault_is_one_finding(name: str) -> None:
    counted = groups_of(name, seed=2, failures=4, draws=150, seconds=30.0)
    assert counted["failures"] >= 3
    assert counted["groups"] == 1, counted["findings"]


@pytest.mark.parametrize("scale", [None, 0.25, -0.125])
def test_the_factor_of_a_wrong_scale_is_told(scale: float | None) -> None:
    """No rule of thumb gives 1.1: it is fitted, and the output lies within the bound of that scale."""
    spec = ProblemSpec(dtype="bf16", num_queries=33, num_keys=40, scale=scale, family="normal", seed=3)
    (guess,) = diagnose(Judged(subjects.wrong_scale, spec.build()))
    assert guess == "the scores are multiplied by 1.1 times the right scale"
