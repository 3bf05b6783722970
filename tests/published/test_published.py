"""Printed numbers come out of our arithmetic; ``python -m tests.published`` takes more draws."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from flashcheck.arithmetic import Arithmetic, flash
from flashcheck.checks import CHECKS, Judged
from flashcheck.formats import BF16
from flashcheck.kernel import ForwardResult, Kernel
from flashcheck.loading import load
from flashcheck.problem import Problem
from tests.checks.subjects import CAPABILITIES, attend
from tests.published import batch_invariance, outliers, rounding_bias


@pytest.mark.parametrize("row", outliers.rows(), ids=lambda row: row.name)
def test_errors_on_outliers_are_those_printed(row: outliers.Row) -> None:
    ours = outliers.measure(row, 6, num_queries=64)
    assert abs(ours.rms - row.printed) <= 0.1 * row.printed + 3 * ours.standard_error
    assert ours.standard_error < row.printed / 4


def test_the_printed_fp16_errors_are_mostly_those_of_the_inputs() -> None:
    flash_row = outliers.rows()[1]
    ours = outliers.measure(flash_row, 6, num_queries=64)
    assert ours.rms_of_attention < flash_row.printed / 3


def test_two_probabilities_of_one_bias_the_bf16_sum_by_a_quarter_ulp() -> None:
    seen = rounding_bias.bias(ties=2)
    assert abs(seen.mean - rounding_bias.PREDICTED) < 4 * seen.standard_error
    remedied = rounding_bias.bias(ties=2, shift=math.log(1.37))
    assert abs(remedied.mean) < 4 * remedied.standard_error


def _tied(count: int = 256) -> Problem:
    """One query a sequence, with two maxima among 8 keys; V has one sign."""
    scores, v = rounding_bias.rows(count, 16, ties=2)
    q = torch.ones((count, 1, 1, 16)).bfloat16()
    k = (scores[:, :, :, None] / 16).expand(count, 1, 8, 16).bfloat16()
    return Problem(q, k, v[:, None], scale=1.0)


def _rounded_before_division(problem: Problem) -> ForwardResult:
    """What the paper describes: P V leaves the matrix unit in bf16, and is divided after that."""
    scores = problem.q.double() @ problem.k.double().mT * problem.effective_scale
    p = (scores - scores.amax(-1, keepdim=True)).exp()
    unnormalised = (p @ problem.v.double()).float().bfloat16()
    out = (unnormalised.float() / p.sum(-1, keepdim=True).float()).bfloat16()
    return replace(attend(problem), out=out)


def _flash(_: Problem) -> Arithmetic:
    return flash(BF16)


@pytest.mark.parametrize("faulty", [False, True])
def test_only_rounding_before_the_division_is_biased_and_the_check_of_bias_sees_it(faulty: bool) -> None:
    forward = _rounded_before_division if faulty else attend
    kernel = Kernel(name="subject", forward=forward, capabilities=CAPABILITIES, arithmetic=_flash)
    problem = _tied()
    scores = problem.q.double() @ problem.k.double().mT * problem.effective_scale
    exact = scores.softmax(-1) @ problem.v.double()
    ulp = torch.exp2(torch.floor(torch.log2(exact.abs())) - 7)
    errors = ((kernel.forward(problem).out.double().abs() - exact.abs()) / ulp).flatten()
    standard_error = float(errors.std()) / math.sqrt(len(errors))
    expected = rounding_bias.PREDICTED if faulty else 0.0
    assert abs(float(errors.mean()) - expected) < 4 * standard_error
    record = CHECKS["forward.bias"].on(Judged(kernel, problem))
    assert record.status == ("fail" if faulty else "pass"), record.message


@pytest.mark.parametrize("num_queries", batch_invariance.QUERIES.values(), ids=batch_invariance.QUERIES)
def test_the_bundled_kernel_is_batch_invariant(num_queries: int) -> None:
    kernel = load("kernels:flash_attention")
    assert batch_invariance.invariance(kernel, num_queries, torch.bfloat16).changed == 0
