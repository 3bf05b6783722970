"""bitwise.orders: a kernel's bits may not tell in which order its programs ran, nor where its pages lie."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch

from flashcheck.checks import CHECKS, Judged, Status, check_named
from flashcheck.inputs.spec import ProblemSpec
from flashcheck.kernel import ForwardResult, Kernel
from flashcheck.loading import load
from flashcheck.mutants import control, mutant_named
from flashcheck.problem import Problem
from tests.checks.subjects import attend, kernel

CHECK = check_named("bitwise.orders")
SPEC = ProblemSpec(
    dtype="bf16",
    batch=2,
    num_heads=2,
    num_kv_heads=1,
    num_queries=3,
    num_keys=30,
    causal="bottom_right",
    seed=2,
)


@pytest.mark.parametrize(
    ("name", "orders"),
    [("kernels:flash_attention", {"launches"}), ("kernels:flash_decode", {"launches", "pages"})],
)
def test_the_kernels_of_this_repository_do_not_tell(name: str, orders: set[str]) -> None:
    subject = load(name)
    assert set(subject.orders) == orders
    record = CHECK(subject, SPEC.build())
    assert record.status is Status.PASS, record
    for order in orders:  # each of them had something to order
        one = replace(subject, orders={order: subject.orders[order]})
        assert CHECK(one, SPEC.build()).status is Status.PASS


def test_only_this_check_rejects_a_program_that_goes_by_its_ticket() -> None:
    mutant = mutant_named("order-by-ticket")
    judged = Judged(mutant.make(), mutant.expose()[-1])
    failing = [name for name, check in CHECKS.items() if check.on(judged).failed]
    assert failing == ["bitwise.orders"]


class Paged:
    """A kernel that reads its keys through pages; ``wrong``: it takes the last page for the one before."""

    def __init__(self, wrong: bool) -> None:
        self.wrong = wrong
        self.moved: list[int] | None = None

    @contextmanager
    def pages(self, _: int) -> Iterator[list[int]]:
        self.moved = []
        try:
            yield self.moved
        finally:
            self.moved = None

    def __call__(self, problem: Problem) -> ForwardResult:
        if self.moved is not None:
            self.moved.append(problem.num_keys)
            if self.wrong:
                order = torch.arange(problem.num_keys)
                order[-1] = order[0]
                problem = problem.replaced(v=problem.v[:, :, order])
        return attend(problem)


@pytest.mark.parametrize("wrong", [False, True])
def test_a_page_that_is_lost_is_a_failure(wrong: bool) -> None:
    forward = Paged(wrong)
    subject = replace(kernel(forward), orders={"pages": forward.pages})
    record = CHECK(subject, SPEC.build())
    assert record.failed == wrong, record
    if wrong:
        assert "another order of pages" in record.message


def test_a_backward_that_tells_is_a_failure() -> None:
    honest = control()
    assert honest.backward is not None
    inside: list[int] = []

    @contextmanager
    def launches(seed: int) -> Iterator[list[int]]:
        inside.append(seed)
        yield inside
        inside.clear()

    def backward(problem, out, lse):
        got = dict(honest.backward(problem, out, lse))
        return {
            **got,
            "dk": torch.nextafter(got["dk"], torch.full_like(got["dk"], 9.0)) if inside else got["dk"],
        }

    def subject(run) -> Kernel:
        return replace(honest, backward=run, orders={"launches": launches})

    problem = replace(SPEC, dtype="fp32").build()
    record = CHECK(subject(backward), problem)
    assert record.failed
    assert "dk" in record.message
    assert CHECK(subject(honest.backward), problem).status is Status.PASS


def test_what_moves_nothing_proves_nothing() -> None:
    """A hook without effect, or a problem of one program, is no proof: not applicable."""

    @contextmanager
    def idle(_: int) -> Iterator[list[int]]:
        yield []

    assert CHECK(replace(kernel(), orders={"idle": idle}), SPEC.build()).status is Status.NOT_APPLICABLE
    assert CHECK(kernel(), SPEC.build()).status is Status.NOT_APPLICABLE


def test_a_hook_that_breaks_is_the_kernels_failure() -> None:
    @contextmanager
    def broken(_: int) -> Iterator[list[int]]:
        raise OSError("no such page")
        yield []

    record = CHECK(replace(kernel(), orders={"pages": broken}), SPEC.build())
    assert record.failed
    assert "no such page" in record.message
