"""Seeded faults are real: the line runs, changes the result, and its check rejects it, not the control."""

from __future__ import annotations

import inspect
import re

import pytest
import torch
from torch import Tensor

from flashcheck.checks import CHECKS
from flashcheck.checks.record import Status
from flashcheck.kernel import ForwardResult
from flashcheck.mutants import MUTANTS, control, flash, mutant_named, scores, stores, visibility
from flashcheck.mutants.switches import Switches

TWELVE = (
    "scale-wrong",
    "lost-tile",
    "no-rescale",
    "causal-one-extra",
    "causal-top-left",
    "key-tail-counted",
    "lse-base-2",
    "accumulator-fp16",
    "p-e4m3",
    "gqa-tiled-heads",
    "rows-zeroed",
    "finite-max-start",
)
"""The first twelve, one per class of silent fault that the ordinary test misses."""


def same(a: Tensor, b: Tensor) -> bool:
    return bool(((a == b) | (torch.isnan(a) & torch.isnan(b))).all())


def same_result(a: ForwardResult, b: ForwardResult) -> bool:
    assert a.lse is not None
    assert b.lse is not None
    return same(a.out, b.out) and same(a.lse, b.lse)


def test_the_first_twelve_are_there() -> None:
    assert set(TWELVE) <= set(MUTANTS)


def test_every_switch_in_the_code_is_a_registered_mutant_and_the_other_way_round() -> None:
    text = "".join(inspect.getsource(m) for m in (flash, scores, stores, visibility))
    assert set(re.findall(r'\bon\("([\w-]+)"\)', text)) == set(MUTANTS)


@pytest.mark.parametrize("name", MUTANTS)
def test_the_fault_is_reached_changes_the_result_and_is_caught(name: str) -> None:
    mutant = mutant_named(name)
    switches = Switches([name])
    faulty, honest = mutant.make_with(switches), control(mutant.splits)
    *before, problem = mutant.expose()
    for earlier in before:
        faulty.forward(earlier)
    assert faulty.capabilities.refuses(problem) is None
    result, wanted = faulty.forward(problem), honest.forward(problem)
    assert switches.hits[name], "the faulty line never ran"
    if mutant.caught_by != "bitwise.repeat":  # such a fault shows between two calls
        assert not same_result(result, wanted), "the fault changes nothing on its exposing input"
    check = CHECKS[mutant.caught_by]
    assert check(faulty, problem).status is Status.FAIL
    verdict = check(honest, problem)
    assert verdict.status is Status.PASS, verdict.message
    assert CHECKS["forward.bound"](honest, problem).status is not Status.FAIL


def test_entries_say_what_they_are() -> None:
    for mutant in MUTANTS.values():
        assert mutant.fault
        assert mutant.exposed_by
        assert mutant.letter in "ABCDEFHIJKLNPQSTVWX"
        assert mutant.caught_by in CHECKS
        assert re.fullmatch(r"((\S+#\d+)(, \S+#\d+)*)?", mutant.source)
