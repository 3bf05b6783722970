"""A full device is nobody's fault; a kernel that asks for more than is there is the kernel's."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from flashcheck.arithmetic import Arithmetic
from flashcheck.checks import Judged, JudgeError, KernelError, exhausted
from flashcheck.inputs.spec import ProblemSpec
from flashcheck.kernel import ForwardResult, Kernel
from flashcheck.loading import load
from flashcheck.problem import Problem

SPEC = ProblemSpec(dtype="bf16", num_queries=4, num_keys=4, head_dim=16, value_dim=16)
ERRORS = [
    torch.OutOfMemoryError("CUDA out of memory"),
    RuntimeError("CUDA error: out of memory"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
]


def _full(times: int, error: Exception) -> tuple[Kernel, list[int]]:
    """An honest kernel whose first calls find no memory."""
    honest, calls = load("eager"), [0]

    def forward(problem: Problem) -> ForwardResult:
        calls[0] += 1
        if calls[0] <= times:
            raise error
        return honest.forward(problem)

    return replace(honest, forward=forward, backward=None), calls


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exhausted, "WAITS", (0.0, 0.0))


def _free(monkeypatch: pytest.MonkeyPatch, share: float) -> None:
    monkeypatch.setattr(exhausted, "free_share", lambda _: share)


@pytest.mark.parametrize("error", ERRORS)
def test_a_device_that_is_full_for_a_while_is_asked_again(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    _free(monkeypatch, 0.01)
    kernel, calls = _full(2, error)
    assert Judged(kernel, SPEC.build()).answers()
    assert calls == [3]


@pytest.mark.parametrize("error", ERRORS)
def test_a_device_that_stays_full_gives_no_verdict(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    _free(monkeypatch, 0.01)
    with pytest.raises(JudgeError, match="other processes"):
        Judged(_full(100, error)[0], SPEC.build()).run()


@pytest.mark.parametrize("error", ERRORS)
def test_a_kernel_that_asks_for_too_much_fails(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    _free(monkeypatch, 0.9)
    kernel, calls = _full(100, error)
    with pytest.raises(KernelError, match=r"out of memory|ALLOC_FAILED"):
        Judged(kernel, SPEC.build()).run()
    assert calls == [1]


def test_other_errors_are_the_kernels_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    _free(monkeypatch, 0.01)
    kernel, calls = _full(100, RuntimeError("an illegal memory access was encountered"))
    with pytest.raises(KernelError, match="illegal"):
        Judged(kernel, SPEC.build()).run()
    assert calls == [1]


def test_where_nothing_is_free_any_error_is_nobodys(monkeypatch: pytest.MonkeyPatch) -> None:
    _free(monkeypatch, 0.001)
    kernel, calls = _full(1, RuntimeError("Expected mha_graph.execute(...).is_good() to be true"))
    assert Judged(kernel, SPEC.build()).answers()
    assert calls == [2]


def test_a_declaration_meets_a_full_device_too(monkeypatch: pytest.MonkeyPatch) -> None:
    _free(monkeypatch, 0.01)
    honest, calls = load("eager"), [0]

    def arithmetic(problem: Problem) -> Arithmetic:
        calls[0] += 1
        if calls[0] == 1:
            raise ERRORS[1]
        return honest.arithmetic(problem)

    assert Judged(replace(honest, arithmetic=arithmetic), SPEC.build()).rules
    assert calls == [2]
