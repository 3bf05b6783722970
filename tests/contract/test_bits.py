"""Bits are read off tensors of any strides: results and problems are views of somebody's memory."""

from __future__ import annotations

import pytest
import torch

from flashcheck.bits import bits_of, bytes_of
from flashcheck.checks import CHECKS, Judged
from flashcheck.checks.fresh_process import digest_of
from flashcheck.fuzz.case import problem_from_json, problem_to_json
from flashcheck.fuzz.judge import digest_of as fuzz_digest
from flashcheck.inputs.spec import ProblemSpec
from flashcheck.kernel import ForwardResult, Kernel
from flashcheck.problem import Problem
from tests.checks.subjects import attend, kernel

DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.bool,
    torch.int64,
    torch.int32,
]


def odd_strides(x: torch.Tensor) -> torch.Tensor:
    """The same values; dimensions of extent 1 get strides that fit no layout."""
    strides = [x.stride(d) if n > 1 else 7 + 2 * d for d, n in enumerate(x.shape)]
    return torch.as_strided(x.clone(), x.shape, strides)


@pytest.mark.parametrize(
    "shape", [(), (1, 1, 1, 1), (2, 1), (1, 3, 1), (2, 1, 3, 1), (0, 1), (2, 3)], ids=str
)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bits_do_not_depend_on_strides(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = torch.randint(0, 2, shape).to(dtype)
    plain = bytes_of(x)
    assert len(plain) == x.numel() * x.element_size()
    views = [odd_strides(x)]
    if x.ndim > 1:
        views.append(x.mT.contiguous().mT)
    if x.ndim:
        views.append(x.unsqueeze(-1).expand(*shape, 2).contiguous()[..., 0])
    for view in views:
        assert bytes_of(view) == plain
        assert torch.equal(bits_of(view), bits_of(x))


def test_a_flipped_bit_and_the_sign_of_zero_show() -> None:
    x = torch.zeros(2, 1, 3)
    assert bytes_of(x) != bytes_of(-x)
    assert bytes_of(odd_strides(x)) != bytes_of(odd_strides(-x))


def stray(subject: Kernel) -> Kernel:
    """The kernel, with results whose strides along single rows fit no layout."""

    def forward(problem: Problem) -> ForwardResult:
        result = subject.forward(problem)
        assert result.lse is not None
        return ForwardResult(odd_strides(result.out), odd_strides(result.lse))

    return Kernel(
        name="stray",
        forward=forward,
        capabilities=subject.capabilities,
        arithmetic=subject.arithmetic,
        source="here",
    )


@pytest.mark.parametrize("lengths", [(1, 33), (1, 1), (5, 1)])
def test_every_check_takes_results_of_any_strides(lengths: tuple[int, int]) -> None:
    """One query and one value column: most dimensions of a result have extent 1 and may have any stride."""
    spec = ProblemSpec(dtype="bf16", num_queries=lengths[0], num_keys=lengths[1], value_dim=1)
    judged = Judged(stray(kernel(attend, batch_invariant=True)), spec.build())
    for name, check in CHECKS.items():
        record = check.on(judged)
        assert not record.failed, (name, record)


def test_digests_and_stored_problems_take_any_strides() -> None:
    problem = ProblemSpec(dtype="fp32", num_queries=1, num_keys=1, head_dim=1, value_dim=1).build()
    moved = problem.replaced(**{n: odd_strides(getattr(problem, n)) for n in ("q", "k", "v")})
    assert problem_to_json(moved) == problem_to_json(problem)
    assert torch.equal(problem_from_json(problem_to_json(moved)).q, problem.q)
    judged = Judged(stray(kernel()), problem)
    plain = Judged(kernel(), problem)
    assert fuzz_digest(judged) == fuzz_digest(plain)
    assert digest_of(judged.result) == digest_of(plain.result)
