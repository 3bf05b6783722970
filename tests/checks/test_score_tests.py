"""The score tests see a scale off by 1e-4 and a truncating cast, measure them, and no honest kernel fails."""

from dataclasses import replace

import pytest
import torch

from flashcheck import emulator
from flashcheck.arithmetic import ARITHMETICS, HOPPER, IEEE
from flashcheck.bounds import score_tests
from flashcheck.bounds.score_tests import ScoreSums
from flashcheck.bounds.stored import stored
from flashcheck.checks import CHECKS, Judged, Status, check_named
from flashcheck.checks.score_tests import CHECK_NAMES, ScoreTally
from flashcheck.formats import BF16, FP16, format_named, round_nearest
from flashcheck.inputs.spec import ProblemSpec
from flashcheck.loading import load
from flashcheck.mutants import MUTANTS, control, exposing
from tests.bounds import sensitivity

SIZE = {"lengths": (128, 160), "dims": (32, 32)}


def sums(kernel, problem):
    return Judged(kernel, problem).score_sums


def without_lse(kernel):
    """A log-sum-exp would give a wrong scale away; many kernels return none."""
    return replace(
        kernel,
        forward=lambda problem: replace(kernel.forward(problem), lse=None),
        capabilities=replace(kernel.capabilities, lse=False),
    )


@pytest.mark.parametrize("machine", [IEEE, HOPPER], ids=lambda m: m.name)
@pytest.mark.parametrize("preset", ["flash.fp16", "flash.bf16", "eager.fp16"])
def test_honest_kernels_pass(preset, machine):
    """Ten problems: the estimates are as far from 0 as their standard errors say."""
    kernel = emulator.as_kernel(ARITHMETICS[preset], machine, name=preset)
    kernel = replace(kernel, arithmetic=lambda _: ARITHMETICS[preset])  # tiling unknown
    tallies = {name: ScoreTally() for name in CHECK_NAMES}
    for seed in range(10):
        fmt = format_named(preset[-4:])
        for name, found in sums(kernel, exposing.draw(fmt, seed=seed, lengths=(32, 160))).items():
            tallies[name].add(found)
    assert tallies["scale"].elements > 10_000
    for name, tally in tallies.items():
        if tally.elements:  # eager kernels keep P in fp32: nothing to say about its cast
            assert tally.verdict(name, "").status is Status.PASS
            assert abs(tally.amount) < 5 * tally.standard_error + tally.allowed


@pytest.mark.parametrize("fault", [1e-4, -7e-5, 3e-5])
def test_a_wrong_scale_is_measured(fault):
    """fp16, three problems: the estimate lies within a tenth of the planted error."""
    kernel = emulator.as_kernel(ARITHMETICS["flash.fp16"], name="x")
    tally = ScoreTally()
    for seed in range(3):
        problem = exposing.draw(FP16, seed=seed, **SIZE)
        wrong = kernel.forward(problem.replaced(scale=problem.effective_scale * (1 + fault)))
        faulty = replace(
            kernel,
            forward=lambda _, wrong=wrong: wrong,
            arithmetic=lambda _: ARITHMETICS["flash.fp16"],
        )
        tally.add(sums(faulty, problem)["scale"])
    assert tally.amount == pytest.approx(fault, abs=abs(fault) / 10 + 4 * tally.standard_error)
    assert tally.verdict("scale", "").failed


def test_the_score_test_kills_a_scale_that_bound_rms_and_algorithm_let_pass():
    mutant = MUTANTS["scale-slightly-wrong"]
    (problem,) = mutant.expose()
    judged = Judged(without_lse(mutant.make()), problem)
    assert CHECKS["forward.score_scale"].on(judged).failed
    for name in ("forward.bound", "forward.rms", "forward.algorithm", "forward.cast_of_p"):
        assert not CHECKS[name].on(judged).failed
    honest = Judged(without_lse(control(tiling_known=False)), problem)
    assert not CHECKS["forward.score_scale"].on(honest).failed


def test_a_truncating_cast_is_measured_as_one():
    mutant = MUTANTS["p-truncated"]
    problem = exposing.draw(BF16, **SIZE)
    found = sums(mutant.make(), problem)["cast"]
    assert 0.7 < found.projection / found.information < 1.4
    honest = sums(control(tiling_known=False), problem)["cast"]
    assert abs(honest.projection / honest.information) < 0.1


def test_problems_whose_scores_do_not_scale_are_left_out():
    kernel = control()
    problem = exposing.draw(FP16, softcap=4.0, **SIZE)
    assert set(sums(kernel, problem)) == {"cast"}


def test_a_group_of_few_elements_is_not_judged():
    tally = ScoreTally()
    tally.add(ScoreSums(projection=1e9, information=1.0, variance=1.0, allowance=0.0, elements=10))
    assert tally.verdict("scale", "").status is Status.NOT_APPLICABLE


def test_scatter_between_problems_widens_the_standard_error():
    tally = ScoreTally()
    for projection in (50.0, -50.0, 50.0, -50.0):
        tally.add(ScoreSums(projection, 1.0, 1.0, 0.0, 1000))
    assert tally.standard_error > 20


def test_no_single_problem_decides_about_a_group():
    tally = ScoreTally()
    for projection in (0.5, -0.5, 0.3, 500.0):
        tally.add(ScoreSums(projection, 100.0, 100.0, 0.0, 1000))
    assert tally.verdict("scale", "").status is Status.PASS
    for _ in range(20):
        tally.add(ScoreSums(450.0, 100.0, 100.0, 0.0, 1000))
    assert tally.verdict("scale", "").failed


def test_sums_that_are_not_finite_are_left_out():
    tally = ScoreTally()
    tally.add(ScoreSums(float("nan"), 1.0, 1.0, 0.0, 1000))
    assert tally.elements == 0


def test_the_projection_is_weighted_by_what_it_tells():
    """The variance of sum W e is sum W H: problems then add with the weights that suit them best."""
    kernel = emulator.as_kernel(ARITHMETICS["flash.bf16"], name="x")
    kernel = replace(kernel, arithmetic=lambda _: ARITHMETICS["flash.bf16"])
    found = sums(kernel, exposing.draw(BF16, seed=1, **SIZE))["scale"]
    assert found.variance == pytest.approx(found.information, rel=1e-6)


def test_rows_are_solved_in_parts(monkeypatch):
    """Of a few rows each, to the same sums."""
    kernel = emulator.as_kernel(ARITHMETICS["flash.bf16"], name="x")
    kernel = replace(kernel, arithmetic=lambda _: ARITHMETICS["flash.bf16"])
    problem = exposing.draw(BF16, seed=1, **SIZE)
    whole = sums(kernel, problem)["scale"]
    monkeypatch.setattr(score_tests, "_HELD", 1 << 16)
    parts = sums(kernel, problem)["scale"]
    assert parts.information == pytest.approx(whole.information, rel=1e-9)
    assert parts.projection == pytest.approx(whole.projection, rel=1e-6)


def test_solving_for_the_covariance_tells_more(monkeypatch):
    """Elements of a row share the roundings of P."""
    kernel = emulator.as_kernel(ARITHMETICS["flash.bf16"], name="x")
    kernel = replace(kernel, arithmetic=lambda _: ARITHMETICS["flash.bf16"])
    problem = exposing.draw(BF16, seed=1, **SIZE)
    solved = sums(kernel, problem)["scale"].information
    monkeypatch.setattr(score_tests, "_SOLVED", 0)
    assert solved > 1.5 * sums(kernel, problem)["scale"].information


@pytest.mark.parametrize("deviation", [1e-9, 0.02, 0.1, 0.3, 0.49, 0.6, 2.0])
def test_what_is_stored_of_a_noisy_value(deviation):
    """Mean, slope and variance of RN(x + noise), against draws; the noise in spacings."""
    x = 1 + 2.0**-7 * torch.linspace(10.0, 12.0, 41, dtype=torch.float64)
    noise = 2.0**-7 * deviation * torch.randn(100_000, 1, generator=torch.Generator().manual_seed(1)).double()
    spacing = 2.0**-7
    drawn = round_nearest(x + noise, BF16)
    found = stored(x, torch.full_like(x, (deviation * spacing) ** 2), BF16)
    room = 5 * max(deviation, 0.3) / 100_000**0.5 + (0.01 if deviation > 0.5 else 0.0)
    assert float((drawn.mean(0) - found.mean).abs().max()) < room * spacing
    assert float((drawn.var(0) - found.variance).abs().max()) < 6 * room * spacing**2
    step = 1e-4 * spacing
    square = torch.full_like(x, (deviation * spacing) ** 2)
    higher, lower = (stored(x + moved, square, BF16).mean for moved in (step, -step))
    if deviation > 0.01:
        assert torch.allclose((higher - lower) / (2 * step), found.slope, atol=2e-2)


@pytest.mark.parametrize("family", ["offset_v", "offset_keys", "normal_small", "cancelling_v", "low_rank"])
@pytest.mark.parametrize(
    "name", ["emulator.eager.bf16", "emulator.flash.bf16", "emulator.flash.e4m3", "torch.sdpa.flash", "eager"]
)
def test_one_problem_of_an_honest_kernel_is_not_rejected(name, family):
    """Outputs within one spacing of each other, and weights that are, round one way together."""
    kernel = load(name)
    dtype = "bf16" if "bf16" in kernel.capabilities.dtypes else kernel.capabilities.dtypes[0]
    for seed, (scale, keys) in enumerate(((None, 2), (None, 33), (1.0, 16), (1.0, 48), (0.001, 31))):
        spec = ProblemSpec(
            dtype=dtype,
            num_heads=2,
            num_kv_heads=2,
            num_queries=33,
            num_keys=keys,
            head_dim=64,
            value_dim=64,
            scale=scale,
            family=family,
            seed=seed,
        )
        judged = Judged(kernel, spec.build())
        for check in ("forward.score_scale", "forward.cast_of_p"):
            record = check_named(check).on(judged)
            assert not record.failed, f"{spec}: {record.message}"


def test_a_scale_off_by_7e_5_is_seen_in_bf16():
    """24 problems of 48 rows or fewer, as the sensitivity run draws them."""
    declared = ARITHMETICS["flash.bf16"]
    honest = emulator.as_kernel(declared, name="x")
    for amount, rejected in ((0.0, False), (7e-5, True)):
        kernel = sensitivity.faulty(honest, declared, sensitivity.Fault("scale", scale=amount))
        tally = ScoreTally()
        for problem in sensitivity.problems(BF16, 3, 24):
            tally.add(sums(kernel, problem)["scale"])
        assert tally.verdict("scale", "").failed == rejected
        assert tally.amount == pytest.approx(amount, abs=5 * tally.standard_error)


def _slopes(problem):
    return problem.replaced(scale=0.0, alibi_slopes=torch.full((problem.num_heads,), 0.05))


def _one_bias(problem):
    bias = torch.randn(
        1, 1, problem.num_queries, problem.num_keys, generator=torch.Generator().manual_seed(0)
    )
    return problem.replaced(scale=0.0, bias=bias)


def _one_row_of_bias(problem):
    return problem.replaced(scale=0.0, bias=_one_bias(problem).bias[:, :, :1])


def _same_heads(problem):
    q, k = (x[:1, :1].expand_as(x).clone() for x in (problem.q, problem.k))
    return problem.replaced(q=q, k=k)


SHARED = [_slopes, _one_bias, _one_row_of_bias, _same_heads]


@pytest.mark.parametrize("share", SHARED, ids=lambda f: f.__name__.strip("_"))
@pytest.mark.parametrize("preset", ["flash.bf16", "flash.fp16"])
@pytest.mark.parametrize("normalise", ["after_product", "before_product"])
def test_rows_that_share_their_scores_share_their_roundings(share, preset, normalise):
    """Eight problems: the estimates scatter by no more than their standard errors say."""
    arithmetic = replace(ARITHMETICS[preset], normalise=normalise)
    kernel = emulator.as_kernel(arithmetic, name=preset)
    kernel = replace(kernel, arithmetic=lambda _: arithmetic)  # tiling unknown
    surprises = []
    for seed in range(8):
        problem = share(exposing.draw(format_named(preset[-4:]), seed=seed, lengths=(96, 130), dims=(32, 32)))
        for found in sums(kernel, problem).values():
            surprises.append(max(abs(found.projection) - found.allowance, 0) ** 2 / found.variance)
    assert sum(surprises) / len(surprises) < 2.0
