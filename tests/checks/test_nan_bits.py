"""NaN is one value: IEEE 754 leaves its sign and payload open, and they follow an element's place."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from flashcheck.checks import CHECKS, Judged
from flashcheck.checks.bits import differing
from flashcheck.inputs.spec import ProblemSpec
from flashcheck.kernel import ForwardResult, Kernel
from flashcheck.loading import load
from flashcheck.problem import Problem

CHECKED = ("bitwise.repeat", "bitwise.batch", "bitwise.suffix", "bitwise.scaling", "state.interleaved")


def _problem() -> Problem:
    shape = {
        "num_heads": 4,
        "num_kv_heads": 2,
        "num_queries": 9,
        "num_keys": 33,
        "head_dim": 16,
        "value_dim": 16,
    }
    options = {"scale": 0.0, "causal": "top_left", "family": "overflowing_logits", "seed": 1971385008}
    return ProblemSpec(dtype="bf16", **shape, **options).build()


def _nan_of_other_bits() -> Kernel:
    """An honest kernel whose NaN have another sign and payload in every call and at every place."""
    honest = load("emulator.flash.bf16")
    calls = itertools.count()

    def changed(x: Tensor, call: int) -> Tensor:
        integers = torch.int16 if x.element_size() == 2 else torch.int32
        place = torch.arange(x.numel()).reshape(x.shape) + call
        bits = x.contiguous().view(integers) ^ (place % 2).to(integers) ^ (place % 3 // 2).to(integers) * 2
        return torch.where(x.isnan(), bits.view(x.dtype), x)

    def forward(problem: Problem) -> ForwardResult:
        result, call = honest.forward(problem), next(calls)
        assert result.lse is not None
        return ForwardResult(changed(result.out, call), changed(result.lse, call))

    return replace(honest, forward=forward, backward=None)


@pytest.mark.parametrize("name", CHECKED)
def test_bits_of_a_nan_may_follow_the_place_and_the_call(name: str) -> None:
    judged = Judged(_nan_of_other_bits(), _problem())
    again = judged.run()
    integers = (judged.result.out.view(torch.int16), again.out.view(torch.int16))
    assert bool((judged.result.out.isnan() & (integers[0] != integers[1])).any()), "the input shows nothing"
    assert CHECKS[name].on(judged).status == "pass"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_a_nan_and_a_number_differ(dtype: torch.dtype) -> None:
    a = torch.tensor([1.0, torch.nan, torch.nan, torch.inf], dtype=dtype)
    b = torch.tensor([torch.nan, 1.0, -torch.nan, torch.nan], dtype=dtype)
    assert differing(a, b).tolist() == [True, True, False, True]
