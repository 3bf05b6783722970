"""Rows that are copies of each other are one observation, not a thousand that agree."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from flashcheck.arithmetic import flash
from flashcheck.bounds.copies import distinct_rows
from flashcheck.checks import Judged, check_named
from flashcheck.checks.bias import BiasTally
from flashcheck.checks.record import Status
from flashcheck.checks.rms import RmsTally
from flashcheck.checks.score_tests import ScoreTally
from flashcheck.formats import BF16, FP16, Format
from flashcheck.inputs.spec import ProblemSpec
from flashcheck.kernel import ForwardResult, Kernel
from flashcheck.loading import load
from flashcheck.mutants import MUTANTS, control
from flashcheck.problem import Problem


def test_copies_of_one_key_give_no_verdict_on_its_gradients() -> None:
    """The problem that exposes a narrow accumulator repeats one key 256 times; the control passes on it."""
    problem = MUTANTS["accumulator-fp16"].expose()[-1]
    assert check_named("backward.bias").on(Judged(control(), problem)).status is not Status.FAIL


def test_keys_of_their_own_are_judged_and_an_honest_kernel_passes() -> None:
    g = torch.Generator().manual_seed(5)
    q, dout = (torch.randn(1, 2, 40, 32, generator=g).bfloat16() for _ in range(2))
    k, v = (torch.randn(1, 2, 256, 32, generator=g).bfloat16() for _ in range(2))
    judged = Judged(load("emulator.flash.bf16"), Problem(q, k, v, dout=dout))
    assert check_named("backward.bias").on(judged).status is Status.PASS


def test_distinct_rows_are_the_first_of_their_copies() -> None:
    g = torch.Generator().manual_seed(6)
    got = torch.randn(2, 1, 5, 3, generator=g).half()
    exact = got.double() + 1e-5
    got[0, 0, 3], exact[0, 0, 3] = got[0, 0, 1], exact[0, 0, 1] * (1 + 2.0**-50)  # the oracle's last bits
    got[1, 0, 0], exact[1, 0, 0] = got[0, 0, 1], exact[0, 0, 1]
    got[1, 0, 4] = got[1, 0, 2]  # computed alike, exactly another
    got[0, 0, 0], got[0, 0, 2] = torch.nan, torch.nan
    found = distinct_rows(got, exact)
    assert found.tolist() == [[[True, True, True, False, True]], [[False, True, True, True, True]]]
    turned = torch.stack([got[:1, 0], got[:1, 0].flip(-1)], 1)  # other columns, the same numbers
    assert int(distinct_rows(turned, torch.zeros_like(turned)).sum()) == 8
    assert distinct_rows(torch.zeros(1, 2, 0, 3), torch.zeros(1, 2, 0, 3)).shape == (1, 2, 0)


@pytest.mark.parametrize("name", ["eager", "torch.sdpa.math", "emulator.flash.bf16", "emulator.eager.bf16"])
def test_statistics_count_copies_once(name: str) -> None:
    """With a scale of 0 all rows of a head are one: 3 heads are 3 observations."""
    kernel = load(name)
    spec = ProblemSpec(
        dtype="bf16",
        num_heads=3,
        num_kv_heads=3,
        num_queries=64,
        num_keys=65,
        head_dim=16,
        value_dim=16,
        scale=0.0,
        seed=3,
    )
    problem = spec.build()
    judged = Judged(kernel, problem)
    rms, bias, score = RmsTally(), BiasTally(), ScoreTally()
    rms.add(judged.measured["O"])
    bias.add(judged.measured["O"])
    for sums in judged.score_sums.values():
        score.add(sums)
    heads = problem.batch * problem.num_heads
    assert rms.rows <= heads + 1e-6
    assert bias.rows <= heads
    assert score.elements <= 2 * heads * problem.value_dim


def test_copies_of_two_rows_are_not_taken_for_a_truncating_cast() -> None:
    """A right kernel; its 96 rows are 2, of which the model expected the scatter of 96."""
    spec = ProblemSpec(
        dtype="fp16",
        num_heads=2,
        num_kv_heads=2,
        num_queries=48,
        num_keys=31,
        head_dim=64,
        value_dim=64,
        scale=0.0,
        mask="first_key",
        family="normal_small",
        seed=575532237,
    )
    assert not check_named("forward.cast_of_p")(load("eager"), spec.build()).failed


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("preset", ["flash.e4m3", "flash.e5m2", "hopper.flash.e4m3", "flash.bf16"])
def test_known_roundings_that_lean_one_way_are_no_bias(preset: str, seed: int) -> None:
    """Scores near 0: every P lies just under 1 and rounds the same way, in every row of every head."""
    spec = ProblemSpec(
        dtype=preset.rsplit(".", 1)[1],
        num_heads=4,
        num_kv_heads=4,
        num_queries=64,
        num_keys=97,
        head_dim=32,
        value_dim=32,
        family="normal_small",
        seed=seed,
    )
    judged = Judged(load(f"emulator.{preset}"), spec.build())
    for name in ("forward.bias", "backward.bias"):
        record = check_named(name).on(judged)
        assert record.status is not Status.FAIL, record
    out = judged.bound.out
    leaning = (
        (judged.result.out.double() - out.interval.exact) * out.interval.exact.sign() / out.predicted_rms
    )
    if (preset, seed) == ("flash.bf16", 0):
        assert abs(float(leaning.mean())) > 0.1  # what would have been taken for a bias


@pytest.mark.parametrize("size", [0.3, 0.04, 0.02, 0.01])
@pytest.mark.parametrize("fmt", [BF16, FP16], ids=lambda fmt: fmt.name)
def test_roundings_that_no_declared_tiling_explains_are_no_bias(fmt: Format, size: float) -> None:
    """The same lean where the tiling is not declared: which way P is rounded is not known then."""
    judged = Judged(_undeclared(fmt), _small_scores(fmt, size, seed=0))
    assert check_named("forward.bias").on(judged).status is not Status.FAIL


def test_the_smallest_of_them_would_have_been_taken_for_a_bias() -> None:
    tally = BiasTally()
    for seed in range(6):
        measured = Judged(_undeclared(BF16), _small_scores(BF16, 0.02, seed)).measured["O"]
        tally.add(replace(measured, bound=replace(measured.bound, alike=None)))
    assert tally.verdict("O").status is Status.FAIL


def test_a_lean_of_the_kernel_shows_without_a_declared_tiling() -> None:
    honest = _undeclared(BF16)

    def truncating(problem: Problem) -> ForwardResult:
        result = load("emulator.flash.fp32").forward(problem.replaced(**_wide(problem)))
        return replace(result, out=(result.out.view(torch.int32) & -65536).view(torch.float32).bfloat16())

    kernel = replace(honest, forward=truncating)
    assert check_named("forward.bias").on(Judged(kernel, _small_scores(BF16, 1.0, seed=0))).failed


def _wide(problem: Problem) -> dict[str, Any]:
    return {name: getattr(problem, name).float() for name in ("q", "k", "v")}


def _undeclared(fmt: Format) -> Kernel:
    """An honest kernel that does not say how it tiles."""
    kernel = load(f"emulator.flash.{fmt.name}")
    return replace(kernel, arithmetic=lambda _: flash(fmt), backward=None)


def _small_scores(fmt: Format, size: float, seed: int) -> Problem:
    spec = ProblemSpec(
        dtype=fmt.name,
        num_heads=4,
        num_kv_heads=4,
        num_queries=33,
        num_keys=64,
        head_dim=32,
        value_dim=32,
        seed=seed,
    )
    problem = spec.build()
    return problem.replaced(q=problem.q * size, k=problem.k * size)
