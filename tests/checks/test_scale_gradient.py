"""A backward may return the gradient of the scale; where it does, it is judged as the others are."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from flashcheck.checks import CHECKS, Judged, Status
from flashcheck.checks.rms import LARGEST_RATIO
from flashcheck.loading import load
from tests.bounds.honest import problem

NAMES = ("backward.bound", "backward.own_forward", "backward.end_to_end")
KERNEL = "emulator.flash.bf16"
OPTIONS: dict[str, dict[str, object]] = {
    "plain": {},
    "negative scale": {"scale": -0.3},
    "softcap": {"softcap": 1.0, "scale": 1.0},
    "grouped causal": {"heads": (4, 2), "causal": "bottom_right"},
    "descales": {"q_descale": 2.5, "k_descale": 0.3},
}


def returning(change):
    """The honest kernel with another dscale."""
    honest = load(KERNEL)

    def backward(p, out, lse):
        assert honest.backward is not None
        got = dict(honest.backward(p, out, lse))
        got["dscale"] = change(p, got["dscale"])
        return got

    return replace(honest, backward=backward)


def of_scaled_scores(p, dscale):
    """sum of dS (scale q . k): the product as it enters the softmax."""
    return dscale * p.effective_scale


def of_the_first_head(p, dscale):  # noqa: ARG001
    """As a kernel whose programs overwrite each other."""
    honest = load(KERNEL)
    first = p.replaced(q=p.q[:, :1], k=p.k[:, :1], v=p.v[:, :1], dout=p.dout[:, :1], dlse=None)
    judged = Judged(honest, first)
    return judged.gradients["dscale"]


FAULTS = {
    "of the scaled scores": of_scaled_scores,
    "one head": of_the_first_head,
    "sign": lambda p, x: -x,  # noqa: ARG005
    "a tenth too large": lambda p, x: x * 1.1,  # noqa: ARG005
    "left at 0": lambda p, x: 0 * x,  # noqa: ARG005
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("name", [KERNEL, "emulator.hopper.flash.fp16", "emulator.eager.fp16"])
def test_an_honest_gradient_of_the_scale_is_accepted(name, options):
    judged = Judged(load(name), problem(name.rpartition(".")[2], seed=1, **options))
    assert judged.measured_gradients["dScale"].elements == 1
    for check in NAMES:
        assert not CHECKS[check](judged.kernel, judged.problem).failed


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_a_wrong_one_is_rejected(fault):
    record = CHECKS["backward.bound"](returning(fault), problem("bf16", heads=(2, 2), seed=2))
    assert record.status is Status.FAIL
    assert "dScale" in record.message


def test_without_the_derivative_of_the_cap_it_is_rejected():
    p = problem("bf16", seed=3, softcap=1.0, scale=1.0)
    uncapped = Judged(load(KERNEL), p.replaced(softcap=None)).gradients["dscale"]
    assert CHECKS["backward.bound"](returning(lambda p, x: uncapped), p).failed  # noqa: ARG005


def test_a_kernel_that_declares_and_does_not_return_it_is_at_fault():
    honest = load(KERNEL)

    def backward(p, out, lse):
        return {n: x for n, x in honest.backward(p, out, lse).items() if n != "dscale"}

    record = CHECKS["backward.bound"](replace(honest, backward=backward), problem("bf16"))
    assert record.status is Status.FAIL
    assert "dscale" in record.message


def test_nothing_is_asked_of_a_kernel_that_declares_none():
    honest = load(KERNEL)
    declared = replace(honest.capabilities, gradients=("dq", "dk", "dv"))
    judged = Judged(replace(honest, capabilities=declared), problem("bf16"))
    assert "dScale" not in judged.measured_gradients
    assert "dscale" not in judged.backward_bound.tensors


@pytest.mark.parametrize(
    ("name", "least"), [("emulator.flash.fp32", 0.5), ("emulator.hopper.flash.bf16", 0.4)]
)
def test_its_error_meets_the_prediction(name, least):
    """One number a problem: 25 of them tell a factor, not per cents. The prediction is an upper end."""
    ratios = []
    for seed in range(25):
        options = list(OPTIONS.values())[seed % 4]
        judged = Judged(load(name), problem(name.rpartition(".")[2], seed=seed, **options))
        sums = judged.measured_gradients["dScale"].rms
        assert sums is not None
        ratios.append(float(sums.measured / sums.predicted))
    ratio = math.sqrt(sum(ratios) / len(ratios))
    assert least <= ratio <= LARGEST_RATIO * (1 + 1 / math.sqrt(2 * len(ratios)))


@pytest.mark.parametrize("sizes", [(3e19, 3e19, 1.0), (1.0, 1.0, 3e38)], ids=["q.k", "dP"])
def test_past_the_range_nan_is_legal_and_another_number_is_not(sizes):
    """q.k, or dP, may leave fp32's range on the way although the sum does not."""
    p = problem("fp32", sizes=sizes, scale=1e-38 if sizes[0] > 1 else 1.0, seed=4)
    interval = Judged(load("emulator.flash.fp32"), p).backward_bound.tensors["dscale"].interval
    assert bool(interval.may_overflow)
    assert bool(interval.accepts(torch.tensor(math.nan)))
    if math.isfinite(float(interval.upper)):
        assert not bool(interval.accepts(interval.upper * 1.5 + 1.0))
