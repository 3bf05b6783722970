"""Honest kernels at the ends of their formats stay inside their bounds.

``found.json`` holds problems on which a soundness run once found one outside; each stood for a fault of the
bound, of the emulator or of the machine model. The families drawn here are the kinds they belong to.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from flashcheck import emulator
from flashcheck.inputs.problems import Wishes, draw_spec, families_for
from flashcheck.inputs.spec import ProblemSpec
from flashcheck.loading import load
from tests.bounds.adversary import margins_of

FOUND = json.loads(Path(__file__).with_name("found.json").read_text())
FAMILIES = ("overflowing_logits", "format_maxima", "extreme_logits", "subnormals")
KERNELS = (*emulator.KERNELS, "torch.sdpa.flash", "torch.sdpa.math", "torch.flex.eager")


def _id(found):
    return f"{found['kernel']}-{found['spec']['family']}-{found['tensor']}"


@pytest.mark.parametrize("found", FOUND, ids=_id)
def test_problems_once_found_outside(found):
    worst = margins_of(load(found["kernel"]), ProblemSpec.from_json(found["spec"]))
    assert max(worst.values()) <= 1, worst


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", KERNELS)
def test_problems_of_their_kinds(name, family):
    kernel = load(name)
    if family not in families_for(kernel.capabilities):
        pytest.skip("scores past fp32 are not declared")
    rng = random.Random(f"{name}/{family}")
    judged = 0
    while judged < 1:
        lengths = rng.choice((1, 2, 17, 33)), rng.choice((1, 2, 31))
        dtype = rng.choice(kernel.capabilities.dtypes)
        spec = draw_spec(
            rng, kernel.capabilities, dtype, rng.randrange(2**31), Wishes(family=family, lengths=lengths)
        )
        refused = kernel.capabilities.refuses(spec.outline())
        if refused is not None or (spec.leaves_rows() and not kernel.capabilities.empty_rows):
            continue
        worst = margins_of(kernel, spec)
        assert max(worst.values(), default=0.0) <= 1, (worst, spec)
        judged += 1
