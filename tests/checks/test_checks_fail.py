"""Every check can fail, and an honest kernel passes all of them."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch

from flashcheck.checks import CHECKS, Judged, Status, check_named
from flashcheck.checks.diagnose import diagnose
from flashcheck.checks.rms import RmsTally
from flashcheck.inputs.spec import ProblemSpec
from flashcheck.kernel import ForwardResult
from flashcheck.problem import Problem
from tests.checks.subjects import attend, kernel

SPEC = ProblemSpec(
    dtype="bf16",
    num_heads=6,
    num_kv_heads=2,
    num_queries=40,
    num_keys=33,
    head_dim=32,
    value_dim=16,
    causal="bottom_right",
    seed=5,
)


@pytest.mark.parametrize("name", list(CHECKS))
@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32"])
@pytest.mark.parametrize("family", ["normal", "huge_logits", "one_hot", "overflowing_logits"])
def test_an_honest_kernel_fails_nothing(name: str, dtype: str, family: str) -> None:
    problem = ProblemSpec(
        dtype=dtype,
        num_heads=4,
        num_kv_heads=2,
        num_queries=40,
        num_keys=33,
        causal="bottom_right",
        family=family,
    ).build()
    record = check_named(name)(kernel(), problem)
    assert not record.failed, record


FAULTS = {
    "scale": (dict(scale_factor=math.log(2.0)), "not multiplied by log2(e)"),
    "causal": (dict(shift=1), "one key past the diagonal"),
    "causal the other way": (dict(shift=-1), "does not see the key on the diagonal"),
    "alignment": (dict(shift=7), "treated as top_left"),
    "heads": (dict(tiled_heads=True), "h mod num_kv_heads"),
    "tail": (dict(lost_keys=(32, 33)), "ragged tail"),
    "tile": (dict(lost_keys=(16, 32)), "keys 16..31 is lost"),
    "lse": (dict(lse_factor=1 / math.log(2.0)), "LSE is in base 2"),
}


@pytest.mark.parametrize("fault", list(FAULTS))
def test_forward_bound_rejects_and_the_diagnosis_names_the_fault(fault: str) -> None:
    switches, words = FAULTS[fault]
    subject = kernel(partial(attend, **switches))
    spec = SPEC if fault not in ("tail", "tile") else ProblemSpec(**{**_fields(SPEC), "causal": None})
    judged = Judged(subject, spec.build())
    record = check_named("forward.bound").on(judged)
    assert record.status is Status.FAIL
    assert record.where is not None
    assert record.where.tensor == ("LSE" if fault == "lse" else "O")
    assert record.where.margin > 1
    assert "elements over the bound" in record.evidence[0]
    assert any(words in guess for guess in diagnose(judged)), diagnose(judged)


def _fields(spec: ProblemSpec) -> dict[str, object]:
    return {name: getattr(spec, name) for name in ProblemSpec.__dataclass_fields__}


def test_an_honest_kernel_gets_no_diagnosis() -> None:
    assert diagnose(Judged(kernel(), SPEC.build())) == ()


def test_rows_of_zeros_are_told_with_the_finite_start_of_the_maximum() -> None:
    def finite_start(problem: Problem) -> ForwardResult:
        result = attend(problem)
        low = result.lse is not None and (result.lse < -1e4)
        return ForwardResult(
            torch.where(low.unsqueeze(-1), 0.0, result.out.float()).to(result.out.dtype), result.lse
        )

    spec = ProblemSpec(dtype="fp32", num_queries=20, num_keys=20, family="very_negative")
    guess = diagnose(Judged(kernel(finite_start), spec.build()))[0]
    assert "starts at a finite number" in guess


def test_rms_rejects_one_more_rounding_that_the_bound_accepts() -> None:
    honest, twice = RmsTally(), RmsTally()
    for seed in range(12):
        problem = ProblemSpec(
            dtype="bf16", num_heads=2, num_kv_heads=2, num_queries=64, num_keys=128, seed=seed
        ).build()
        for tally, subject in ((honest, kernel()), (twice, kernel(partial(attend, round_twice=True)))):
            judged = Judged(subject, problem)
            assert not check_named("forward.bound").on(judged).failed
            tally.add(judged.measured["O"])
    assert honest.verdict("O").status is Status.PASS
    assert twice.verdict("O").failed, (honest.ratio, twice.ratio)


def test_rms_says_nothing_on_few_rows() -> None:
    record = check_named("forward.rms")(kernel(), ProblemSpec(dtype="bf16", num_queries=4).build())
    assert record.status is Status.NOT_APPLICABLE


@pytest.mark.parametrize("value", [math.nan, 1e-30])
def test_empty_rows_must_be_exact_zero(value: float) -> None:
    def leaky(problem: Problem) -> ForwardResult:
        result = attend(problem)
        out = result.out.clone()
        out[:, :, 0] = value
        return ForwardResult(out, result.lse)

    assert check_named("special.empty_rows")(kernel(leaky), SPEC.build()).failed


def test_empty_rows_lse_must_be_minus_infinity() -> None:
    def finite(problem: Problem) -> ForwardResult:
        result = attend(problem)
        return ForwardResult(result.out, result.lse.clamp(min=-1e30))

    record = check_named("special.empty_rows")(kernel(finite), SPEC.build())
    assert record.failed
    assert "LSE" in record.message


def test_nonfinite_swallowed_is_a_failure() -> None:
    def guarded(problem: Problem) -> ForwardResult:
        result = attend(problem)
        return ForwardResult(result.out.nan_to_num(0.0), result.lse)

    record = check_named("special.nonfinite")(kernel(guarded), SPEC.build())
    assert record.failed
    assert "does not reach" in record.message


def test_nonfinite_spread_to_another_row_is_a_failure() -> None:
    def leaky(problem: Problem) -> ForwardResult:
        result = attend(problem)
        bad = torch.isnan(result.out).any(-1, keepdim=True).any(-2, keepdim=True)
        return ForwardResult(torch.where(bad, torch.nan, result.out), result.lse)

    record = check_named("special.nonfinite")(kernel(leaky), SPEC.build())
    assert record.failed
    assert "does not see it" in record.message


def test_silent_overflow_is_a_failure() -> None:
    def clamped(problem: Problem) -> ForwardResult:
        result = attend(problem)
        return ForwardResult(result.out.nan_to_num(0.25), result.lse.nan_to_num(3e38, 3e38))

    spec = ProblemSpec(dtype="fp32", num_queries=8, num_keys=8, family="overflowing_logits")
    record = check_named("special.no_silent_overflow")(kernel(clamped), spec.build())
    assert record.failed


def test_taking_a_row_of_overflowed_scores_for_an_empty_one_is_a_failure() -> None:
    """Scores of -inf, all of them: found in the emulator itself, which gave 0."""

    def emptied(problem: Problem) -> ForwardResult:
        result = attend(problem)
        lost = torch.isneginf(result.lse).unsqueeze(-1)
        return ForwardResult(torch.where(lost, 0.0, result.out), result.lse)

    spec = ProblemSpec(dtype="fp32", num_queries=8, num_keys=1, family="overflowing_logits")
    problem = spec.build()
    problem = problem.replaced(k=-problem.k.abs())
    check = check_named("special.no_silent_overflow")
    assert check(kernel(emptied), problem).failed
    assert not check(kernel(attend), problem).failed


def test_reading_past_the_data_is_a_failure() -> None:
    def overreads(problem: Problem) -> ForwardResult:
        storage = problem.k.untyped_storage()
        every = torch.tensor([], dtype=problem.k.dtype).set_(storage)
        return ForwardResult(attend(problem).out + 0 * every[-1], attend(problem).lse)

    assert check_named("isolation.buffers")(kernel(overreads), SPEC.build()).failed


def test_writing_past_the_data_is_a_failure() -> None:
    def overwrites(problem: Problem) -> ForwardResult:
        result = attend(problem)
        torch.tensor([], dtype=problem.k.dtype).set_(problem.k.untyped_storage())[-1] = 3.0
        return result

    record = check_named("isolation.buffers")(kernel(overwrites), SPEC.build())
    assert record.failed
    assert "wrote into the memory of k" in record.message


def test_writing_into_an_input_is_a_failure() -> None:
    def scribbles(problem: Problem) -> ForwardResult:
        result = attend(problem)
        problem.q[..., 0] += 1.0
        return result

    assert check_named("isolation.buffers")(kernel(scribbles), SPEC.build()).failed


def test_a_result_that_changes_is_a_failure() -> None:
    calls = iter(range(100))

    def moody(problem: Problem) -> ForwardResult:
        result = attend(problem)
        return ForwardResult(result.out, result.lse + 2.0**-20 * (next(calls) % 2))

    assert check_named("bitwise.repeat")(kernel(moody), SPEC.build()).failed


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (lambda r: ForwardResult(r.out[..., :1], r.lse), "shape"),
        (lambda r: ForwardResult(r.out.float(), r.lse), "dtype"),
        (lambda r: ForwardResult(r.out, None), "LSE is declared"),
        (lambda r: ForwardResult(r.out, r.lse[..., None]), "LSE has shape"),
        (lambda _: 1 / 0, "raised ZeroDivisionError"),
    ],
)
def test_a_malformed_result_is_a_failure(wrong, words: str) -> None:
    record = check_named("forward.bound")(kernel(lambda problem: wrong(attend(problem))), SPEC.build())
    assert record.failed
    assert words in record.message


def test_rms_of_errors_among_the_subnormal_numbers_is_counted() -> None:
    spec = ProblemSpec(dtype="fp32", num_queries=64, num_keys=64, family="subnormals", seed=1)
    tally = RmsTally()
    for seed in range(8):
        built = ProblemSpec(**{**_fields(spec), "seed": seed}).build()
        tally.add(Judged(kernel(), built).measured["O"])
    assert tally.ratio is not None


def test_a_fault_of_the_judge_is_not_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    from flashcheck import certify
    from flashcheck.plan import make_plan

    def broken(*_: object) -> None:
        raise ZeroDivisionError("in the judge")

    monkeypatch.setattr(certify.TensorSummary, "add", broken)
    subject = kernel(dtypes=("fp32",))
    outcome = certify.certify(subject, make_plan(subject, "quick"))
    assert outcome.verdict is certify.Verdict.JUDGE_FAILED
    assert "ZeroDivisionError" in outcome.judge_faults[0]
    assert outcome.findings == []
