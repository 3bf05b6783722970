"""The emulated backward: right, conditional on what it is given, and rounding where it is told to."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from flashcheck.arithmetic import ARITHMETICS, IEEE, Arithmetic, flash
from flashcheck.emulator import as_kernel
from flashcheck.emulator.backward import backward
from flashcheck.emulator.forward import forward
from flashcheck.emulator.tiles import concrete
from flashcheck.formats import BF16, FP16, FP32, Format, round_nearest
from flashcheck.loading import load
from flashcheck.oracle import fp64
from flashcheck.problem import Problem
from tests.emulator.dense import options_named, small_problem

NAMES = ("dq", "dk", "dv", "dbias", "dsink", "dscale")


def with_gradients(p: Problem, *, dlse: bool = False, seed: int = 5) -> Problem:
    g = torch.Generator().manual_seed(seed)
    shape = (p.batch, p.num_heads, p.num_queries, p.value_dim)
    dout = round_nearest(torch.randn(shape, generator=g, dtype=torch.float64), p.format)
    gradient = torch.randn(shape[:3], generator=g) if dlse else None
    return p.replaced(dout=dout.to(p.q.dtype), dlse=gradient)


def gradients(p: Problem, arithmetic: Arithmetic) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """(emulated, exact) for the emulator's own forward results."""
    declared = concrete(arithmetic)
    result = forward(p, declared, IEEE)
    assert result.lse is not None
    got = dict(backward(p, result.out, result.lse, declared, IEEE))
    exact = fp64.backward(p, result.out, result.lse)
    wanted = {n: x for n in NAMES if (x := getattr(exact, n)) is not None}
    return got, wanted


@pytest.mark.parametrize(
    "name",
    [
        "",
        "causal",
        "window",
        "mask",
        "bias",
        "alibi_slopes",
        "softcap",
        "sink",
        "negative",
        "zero",
        "key_lengths sink causal",
        "softcap alibi_slopes bias mask sink causal",
    ],
)
@pytest.mark.parametrize("preset", ["flash.fp32", "eager.fp32"])
def test_gradients_are_near_the_exact_ones(name: str, preset: str) -> None:
    p = with_gradients(small_problem(FP32, **options_named(name)), dlse=name == "sink")
    got, wanted = gradients(p, ARITHMETICS[preset])
    assert list(got) == list(wanted)
    for key, value in wanted.items():
        torch.testing.assert_close(got[key].double(), value, atol=2e-5, rtol=2e-5)


def test_rows_without_keys_add_nothing() -> None:
    p = with_gradients(small_problem(BF16, key_lengths=torch.tensor([0, 75])))
    got, _ = gradients(p, flash(BF16))
    assert (got["dq"][0] == 0).all()
    assert (got["dk"][0] == 0).all()
    assert (got["dv"][0] == 0).all()


def test_no_output_gradient_no_gradients() -> None:
    p = with_gradients(small_problem(BF16))
    assert p.dout is not None
    got, _ = gradients(p.replaced(dout=torch.zeros_like(p.dout)), flash(BF16))
    assert all((x == 0).all() for x in got.values())


VARIANTS: dict[str, Arithmetic] = {
    "narrow probabilities": flash(FP32, probability_format=BF16, grad_score_format=FP32),
    "narrow grad scores": flash(FP32, grad_score_format=BF16),
    "narrow sums": flash(FP32, grad_accumulator_format=BF16),
    "narrow head sums": flash(FP32, group_grad_format=BF16),
    "narrow output": replace(flash(FP32), output_format=FP16),
    "narrow products": flash(FP32, product_format=BF16),
    "narrow scores": flash(FP32, score_format=FP16),
    "own exponential": flash(FP32, exp_error=2.0**-12),
    "scaled scores": flash(FP32, scale_placement="scores"),
    "scaled operands": flash(FP32, scale_placement="operands"),
    "other query tile": flash(FP32, block_queries=8, grad_accumulator_format=BF16),
    "eager": flash(FP32, normalise="before_product"),
    "dS of a rounded P": flash(
        FP32, probability_format=BF16, grad_score_format=FP32, grad_score_probability="rounded"
    ),
    "narrow delta": flash(FP32, delta_format=BF16),
    "kept probabilities": flash(FP32, backward_probability="kept"),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_every_declaration_changes_the_bits_and_little_else(name: str) -> None:
    p = with_gradients(small_problem(FP32, scale=0.9))
    plain, wanted = gradients(p, flash(FP32))
    result = forward(p, concrete(flash(FP32)), IEEE)
    assert result.lse is not None
    got = backward(p, result.out, result.lse, concrete(VARIANTS[name]), IEEE)
    assert any((got[n].double() != plain[n].double()).any() for n in got)
    for key, value in wanted.items():
        assert (got[key].double() - value).abs().max() < 0.3 * value.abs().max().clamp(min=1)


def test_the_stored_output_and_lse_are_what_counts() -> None:
    p = with_gradients(small_problem(FP32))
    declared = concrete(flash(FP32))
    result = forward(p, declared, IEEE)
    assert result.lse is not None
    out, lse = result.out + 0.25, result.lse - 0.5
    got = backward(p, out, lse, declared, IEEE)
    exact = fp64.backward(p, out, lse)
    for key in ("dq", "dk", "dv"):
        torch.testing.assert_close(got[key].double(), getattr(exact, key), atol=5e-5, rtol=1e-4)


def test_same_problem_same_bits() -> None:
    p = with_gradients(small_problem(BF16, num_keys=70))
    one, two = (gradients(p, flash(BF16))[0] for _ in range(2))
    assert all(torch.equal(one[n], two[n]) for n in one)


@pytest.mark.parametrize("where", ["q", "k", "v", "dout"])
def test_nan_reaches_what_sees_it_and_nothing_else(where: str) -> None:
    p = with_gradients(small_problem(BF16, num_keys=21, causal="top_left"))
    kernel = as_kernel(flash(BF16), name="x")
    assert kernel.backward is not None
    result = kernel.forward(p)
    assert result.lse is not None
    clean = kernel.backward(p, result.out, result.lse)
    poisoned = getattr(p, where).clone()
    poisoned[0, 1, 13, 2] = torch.nan
    got = kernel.backward(p.replaced(**{where: poisoned}), result.out, result.lse)
    rows = torch.zeros(2, 4, 21, dtype=torch.bool)
    keys = torch.zeros(2, 2, 21, dtype=torch.bool)
    if where in ("q", "dout"):
        rows[0, 1, 13], keys[0, 0, :14] = True, True
    else:  # the rows that see key 13 of key head 1, and with them all keys that they see
        rows[0, 2:4, 13:], keys[0, 1] = True, True
    assert torch.equal(got["dq"][~rows], clean["dq"][~rows])
    for name in ("dk", "dv"):
        assert torch.equal(got[name][~keys], clean[name][~keys])
    if where != "k":
        assert torch.isnan(got["dq"][rows]).any(-1).all()


@pytest.mark.parametrize("fmt", [FP16, BF16], ids=str)
@pytest.mark.parametrize("causal", [None, "top_left"])
def test_torchs_declaration_predicts_the_bits_of_its_gradients(fmt: Format, causal: str | None) -> None:
    """The CPU flash back end and the emulation of what is declared for it, side by side.

    Its backward takes the accurate exponential; the forward's fast one alone would blur the comparison.
    """
    g = torch.Generator().manual_seed(3)
    q, k, v, dout = (
        round_nearest(torch.randn(1, 4, n, 32, generator=g, dtype=torch.float64), fmt).to(fmt.dtype)
        for n in (100, 70, 70, 100)
    )
    p = Problem(q, k, v, dout=dout, causal=causal)  # type: ignore[arg-type]
    kernel = load("torch.sdpa.flash")
    theirs = kernel.forward(p)
    assert theirs.lse is not None
    assert kernel.backward is not None
    declared = kernel.arithmetic(p)
    twin = as_kernel(replace(declared, exp_error=None), name="twin")
    other = as_kernel(replace(declared, exp_error=None, block_queries=64), name="other tile")
    assert twin.backward is not None
    assert other.backward is not None
    a = kernel.backward(p, theirs.out, theirs.lse)
    b = twin.backward(p, theirs.out, theirs.lse)
    c = other.backward(p, theirs.out, theirs.lse)
    for name in a:
        assert (a[name] == b[name]).float().mean() > 0.97, name
    for name in ("dk", "dv"):  # the declared query tile is the one that explains the bits
        assert (a[name] == c[name]).float().mean() < 0.9, name
