"""The emulator is honest: it rounds where it is told to, and nowhere else it matters."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from flashcheck.arithmetic import ARITHMETICS, HOPPER, IEEE, Arithmetic, Machine, flash
from flashcheck.emulator import KERNELS, as_kernel
from flashcheck.emulator.forward import forward
from flashcheck.emulator.tiles import concrete
from flashcheck.formats import BF16, E4M3, FP16, FP32, Format
from flashcheck.problem import Problem
from tests.emulator.dense import dense, options_named, small_problem
from tests.emulator.scalar import scalar_forward

EXACT_FUNCTIONS = replace(IEEE, exp_error=0.0, log_absolute=0.0, log_relative=0.0, division_error=0.0)
"""Special functions correctly rounded, so that a scalar loop can predict every bit."""

TOLERANCE = {"fp16": 4e-3, "bf16": 3e-2, "fp32": 1e-5, "e4m3": 0.3, "e5m2": 0.6}


@pytest.mark.parametrize(
    "arithmetic",
    [
        flash(BF16, block_keys=5, order="ascending"),
        flash(FP16, block_keys=5, order="descending"),
        flash(FP32, block_keys=4, order="ascending", scale_placement="exponent_subtract_first"),
        flash(BF16, block_keys=7, order="ascending", scale_placement="scores", row_sum="rounded"),
        replace(flash(E4M3, block_keys=5, order="ascending", probability_scale=256.0), output_format=BF16),
        replace(
            flash(E4M3, block_keys=5, order="ascending", probability_scale=256.0),
            output_format=BF16,
            probability_scale_placement="exponent",
        ),
    ],
    ids=["bf16", "fp16 descending", "fp32 subtract first", "bf16 scores, rounded sum", "e4m3", "e4m3 lifted"],
)
@pytest.mark.parametrize("fused", [False, True], ids=["separate", "fused"])
def test_every_bit_agrees_with_a_scalar_loop(arithmetic: Arithmetic, fused: bool) -> None:
    p = small_problem(arithmetic.input_format, num_keys=17)
    machine = replace(EXACT_FUNCTIONS, fused_multiply_add=fused)
    got = forward(p, arithmetic, machine)
    assert got.lse is not None
    for row in ((0, 0, 0), (1, 3, 20), (0, 2, 7)):
        out, lse = scalar_forward(p, arithmetic, row, fused=fused)
        assert got.out[row].double().tolist() == out
        assert float(got.lse[row]) == lse


@pytest.mark.parametrize("name", KERNELS)
def test_every_preset_is_near_the_exact_answer(name: str) -> None:
    kernel = KERNELS[name]()
    fmt = kernel.arithmetic(small_problem(BF16)).input_format
    p = small_problem(fmt, num_keys=70, causal="bottom_right")
    assert kernel.capabilities.refuses(p) is None
    result = kernel.forward(p)
    out, lse = dense(p)
    assert result.lse is not None
    assert result.out.dtype == kernel.arithmetic(p).output_format.dtype
    assert (result.out.double() - out).abs().max() < TOLERANCE[fmt.name]
    assert (result.lse.double() - lse).abs().max() < (2e-2 if "hopper.flash.e" in name else 1e-4)


@pytest.mark.parametrize(
    "name",
    [
        "causal",
        "window",
        "mask",
        "bias",
        "alibi_slopes",
        "softcap",
        "sink",
        "negative",
        "zero",
        "negative sink",
        "key_lengths sink causal",
        "softcap alibi_slopes bias mask sink causal",
    ],
)
@pytest.mark.parametrize("preset", ["flash.fp32", "eager.fp32"])
def test_options_mean_what_the_contract_means(name: str, preset: str) -> None:
    p = small_problem(FP32, **options_named(name))
    got = forward(p, concrete(ARITHMETICS[preset]), IEEE)
    out, lse = dense(p)
    torch.testing.assert_close(got.out.double(), out, atol=5e-6, rtol=0)
    assert got.lse is not None
    torch.testing.assert_close(got.lse.double(), lse, atol=5e-6, rtol=1e-6)


@pytest.mark.parametrize("name", ["sink", "negative sink", "zero sink", "key_lengths sink causal"])
@pytest.mark.parametrize("splits", [1, 2])
def test_a_sink_may_join_first(name: str, splits: int) -> None:
    p = small_problem(FP32, **options_named(name))
    got = forward(p, concrete(flash(FP32, sink_position="first", splits=splits)), IEEE)
    last = forward(p, concrete(flash(FP32, splits=splits)), IEEE)
    torch.testing.assert_close(got.out.double(), dense(p)[0], atol=5e-6, rtol=0)
    assert got.lse is not None
    torch.testing.assert_close(got.lse.double(), dense(p)[1], atol=5e-6, rtol=1e-6)
    assert not torch.equal(got.out, last.out)


def test_packed_sequences() -> None:
    ends_q, ends_k = torch.tensor([0, 5, 5, 21]), torch.tensor([0, 40, 60, 150])
    p = small_problem(FP32)
    packed = Problem(
        p.q[:1], p.k[:1], p.v[:1], causal="bottom_right", cu_seqlens_q=ends_q, cu_seqlens_k=ends_k
    )
    got = forward(packed, concrete(flash(FP32)), IEEE)
    torch.testing.assert_close(got.out.double(), dense(packed)[0], atol=5e-6, rtol=0)


VARIANTS: dict[str, Arithmetic] = {
    "splits": flash(FP32, splits=3),
    "lazy rescaling": flash(FP32, rescale_threshold=8.0),
    "odd probability scale": flash(FP32, probability_scale=100.0),
    "lifted exponent": flash(FP32, probability_scale=256.0, probability_scale_placement="exponent"),
    "narrow scores": flash(FP32, score_format=FP16),
    "narrow products": flash(FP32, product_format=BF16),
    "narrow probabilities": flash(FP32, probability_format=FP16),
    "narrow log-sum-exp": flash(FP32, lse_format=FP16),
    "narrow output": replace(flash(FP32), output_format=FP16),
    "own exponential": flash(FP32, exp_error=2.0**-12),
    "rounded row sum": flash(FP32, probability_format=BF16, row_sum="rounded"),
    "other tile": flash(FP32, block_keys=16, order="descending"),
    "subtract first": flash(FP32, scale_placement="exponent_subtract_first"),
    "scaled scores": flash(FP32, scale_placement="scores"),
    "scaled operands": flash(FP32, scale_placement="operands"),
    "eager": flash(FP32, normalise="before_product"),
    "two roundings of the constant": flash(FP32, scale_roundings=2),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_every_declaration_changes_the_bits_and_little_else(name: str) -> None:
    """A field that changed nothing would be a rounding that is declared but never done."""
    p = small_problem(FP32, scale=0.9)
    plain = forward(p, concrete(flash(FP32)), IEEE)
    got = forward(p, concrete(VARIANTS[name]), IEEE)
    assert plain.lse is not None
    assert got.lse is not None
    changed = (got.out.double() != plain.out.double()).any() | (got.lse.double() != plain.lse.double()).any()
    assert changed
    assert (got.out.double() - dense(p)[0]).abs().max() < 0.1
    assert (got.lse.double() - dense(p)[1]).abs().max() < 0.1


def test_the_machine_changes_the_bits() -> None:
    p = small_problem(BF16)
    results = [forward(p, concrete(flash(BF16)), m).lse for m in (IEEE, HOPPER, EXACT_FUNCTIONS)]
    assert results[0] is not None
    assert results[1] is not None
    assert not torch.equal(results[0], results[1])
    assert results[2] is not None
    assert not torch.equal(results[0], results[2])


@pytest.mark.parametrize("machine", [IEEE, HOPPER], ids=lambda m: m.name)
def test_same_problem_same_bits(machine: Machine) -> None:
    p = small_problem(BF16, num_keys=70)
    one, two = (forward(p, concrete(flash(BF16)), machine) for _ in range(2))
    assert torch.equal(one.out, two.out)
    assert one.lse is not None
    assert two.lse is not None
    assert torch.equal(one.lse, two.lse)


@pytest.mark.parametrize("preset", ["flash.bf16", "eager.bf16"])
def test_rows_and_problems_without_keys(preset: str) -> None:
    kernel = as_kernel(ARITHMETICS[preset], name="x")
    p = small_problem(BF16)
    for empty in (
        Problem(p.q, p.k[:, :, :0], p.v[:, :, :0]),
        p.replaced(key_lengths=torch.tensor([0, 0])),
    ):
        result = kernel.forward(empty)
        assert (result.out == 0).all()
        assert result.lse is not None
        assert torch.isneginf(result.lse).all()
    sink = torch.tensor([0.5, -1.0, 2.0, 0.0])
    result = kernel.forward(p.replaced(key_lengths=torch.tensor([0, 0]), sink=sink))
    assert result.lse is not None
    assert torch.equal(result.lse, sink.view(1, -1, 1).expand_as(result.lse))


@pytest.mark.parametrize("where", ["q", "k", "v"])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("preset", ["flash.bf16", "eager.bf16"])
def test_nonfinite_values_reach_the_rows_that_see_them_and_no_other(
    preset: str, where: str, bad: float
) -> None:
    p = small_problem(BF16, num_keys=21, causal="top_left")
    kernel = as_kernel(ARITHMETICS[preset], name="x")
    clean = kernel.forward(p)
    poisoned = {n: getattr(p, n).clone() for n in ("q", "k", "v")}
    poisoned[where][0, 1, 13, 2] = bad
    got = kernel.forward(p.replaced(**poisoned))
    touched = torch.zeros(2, 4, 21, dtype=torch.bool)
    if where == "q":
        touched[0, 1, 13] = True
    else:
        touched[0, 2:4, 13:] = True  # query heads 2 and 3 read key head 1
    assert torch.equal(got.out[~touched], clean.out[~touched])
    changed = ~torch.isfinite(got.out).all(-1)
    # An infinite key may also give weight 0, by its sign; all other cases must show.
    if not (bad == torch.inf and where in ("q", "k")):
        assert changed[touched].all()


def test_scores_past_fp32_are_not_finite() -> None:
    q = torch.full((1, 1, 1, 8), 3e38).bfloat16()
    k = torch.zeros(1, 1, 16, 8).bfloat16()
    k[0, 0, 3] = 3e38
    result = forward(Problem(q, k, k.clone()), concrete(flash(BF16)), IEEE)
    assert not torch.isfinite(result.out).any()


def test_extreme_but_legal_scores_stay_exact() -> None:
    """One key at +1e30: the output is its value."""
    q = torch.full((1, 1, 1, 8), 1e15)
    k = torch.zeros(1, 1, 100, 8)
    k[0, 0, 70] = 1e15
    v = torch.arange(100.0).view(1, 1, 100, 1).expand(1, 1, 100, 4).contiguous()
    for placement in ("exponent_subtract_first", "scores", "operands"):
        result = forward(Problem(q, k, v), concrete(flash(FP32, scale_placement=placement)), IEEE)
        assert (result.out == 70).all()


def _format_is_used(fmt: Format, x: torch.Tensor) -> bool:
    return bool((x.to(fmt.dtype).double() == x.double()).all())


def test_lse_is_stored_in_its_format() -> None:
    p = small_problem(FP32)
    lse = forward(p, concrete(flash(FP32, lse_format=BF16)), IEEE).lse
    assert lse is not None
    assert _format_is_used(BF16, lse)
    plain = forward(p, concrete(flash(FP32)), IEEE).lse
    assert plain is not None
    assert not _format_is_used(BF16, plain)


@pytest.mark.parametrize("preset", ["flash.e5m2", "flash.e4m3"])
def test_infinite_eight_bit_values_are_not_saturated_on_their_way(preset: str) -> None:
    """Conversions into fp8 saturate; reading a stored infinity (NaN where fp8 has none) must not."""
    kernel = as_kernel(ARITHMETICS[preset], name="x")
    p = small_problem(ARITHMETICS[preset].input_format, num_keys=21)
    v = p.v.clone()
    v[0, 1, 3, 2] = torch.inf if preset == "flash.e5m2" else torch.nan
    got = kernel.forward(p.replaced(v=v)).out
    assert not torch.isfinite(got[0, 2:, :, 2]).any()
    assert torch.isfinite(got[0, :2]).all()
