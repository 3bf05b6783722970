"""P's scale carried by the softmax's maximum: where that is, and that calls beside the limit are right."""

import dataclasses

import pytest
import torch

from flashcheck.checks import CHECKS
from flashcheck.checks.judged import Judged
from kernels.options import plain_sigma
from kernels.score_path import path_of
from tests.kernels.test_declared import KERNELS, SPEC
from tests.kernels.test_score_path import E4M3, E5M2

KERNEL = KERNELS["flash_attention_e4m3"]
SPEC = dataclasses.replace(
    SPEC, dtype="e4m3", num_kv_heads=1, num_queries=33, head_dim=32, value_dim=32, scale=None, seed=3
)
LAST = 2.0**23 / (448.0**2 * 32 * 1.4426950408889634)
"""The largest scale at which no logit of 32 dims passes 2^23 log2 units."""


def lift(path, head_dim=32, **options):
    return path.lift(head_dim, plain_sigma(head_dim, **options))


def test_where_the_maximum_carries_the_scale():
    e4m3 = path_of(E4M3)
    assert lift(e4m3) == lift(e4m3, scale=LAST) == lift(e4m3, scale=-LAST) == lift(e4m3, 256) == 8.0
    assert lift(e4m3, scale=LAST * 1.0001) == lift(e4m3, softcap=5.0) == lift(e4m3, scale=0.0) == 0.0
    assert (
        lift(path_of(E5M2)) == lift(path_of(torch.bfloat16, "e4m3")) == lift(path_of(torch.bfloat16)) == 0.0
    )


@pytest.mark.parametrize("family", ["normal", "format_maxima", "near_ties", "very_negative", "huge_logits"])
@pytest.mark.parametrize(
    "options",
    [
        {"scale": LAST},
        {"scale": LAST * 1.01},
        {"scale": -LAST},
        {"scale": 1e6},
        {"sink": True},
        {"softcap": 9.0},
    ],
    ids=str,
)
def test_judged_on_both_sides_of_the_limit(family, options, device):
    spec = dataclasses.replace(SPEC, family=family, **options)
    judged = Judged(KERNEL, spec.build(), device.type)
    lifted = spec.softcap is None and (spec.scale is None or abs(spec.scale) <= LAST)
    placement = "exponent" if lifted else "product"
    assert KERNEL.arithmetic(judged.problem).probability_scale_placement == placement
    for check in ("forward.bound", "forward.algorithm"):
        record = CHECKS[check].on(judged)
        assert not record.failed, record.message
