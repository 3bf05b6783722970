"""Seeded faults are real: the line runs, changes the result, and its check rejects it, not the control."""

from __future__ import annotations

import inspect
import re

import pytest
import torch
from torch import Tensor

from flashcheck.checks import CHECKS, Judged
from flashcheck.checks.record import Status
from flashcheck.mutants import MUTANTS, control, flash, gradients, mutant_named, scores, stores, visibility
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


def results(judged: Judged, part: str) -> list[Tensor]:
    """What the pass returned: out and lse, or the gradients."""
    if part == "backward":
        return list(judged.gradients.values())
    assert judged.result.lse is not None
    return [judged.result.out, judged.result.lse]


def test_the_first_twelve_are_there() -> None:
    assert set(TWELVE) <= set(MUTANTS)


def test_every_switch_in_the_code_is_a_registered_mutant_and_the_other_way_round() -> None:
    text = "".join(inspect.getsource(m) for m in (flash, gradients, scores, stores, visibility))
    assert set(re.findall(r'\bon\("([\w-]+)"\)', text)) == set(MUTANTS)


@pytest.mark.parametrize("name", MUTANTS)
def test_the_fault_is_reached_changes_the_result_and_is_caught(name: str) -> None:
    mutant = mutant_named(name)
    switches = Switches([name])
    *before, problem = mutant.expose()
    kernel = mutant.make_with(switches)
    for earlier in before:
        kernel.forward(earlier)
    assert kernel.capabilities.refuses(problem) is None
    faulty, honest = Judged(kernel, problem), Judged(control(mutant.splits, mutant.tiling_known), problem)
    part = "backward" if name.startswith("bwd-") else "forward"
    pairs = list(zip(results(faulty, part), results(honest, part), strict=True))
    assert switches.hits[name], "the faulty line never ran"
    if mutant.caught_by != "bitwise.repeat":  # such a fault shows between two calls
        assert not all(same(a, b) for a, b in pairs), "the fault changes nothing on its exposing input"
    check = CHECKS[mutant.caught_by]
    assert check.on(faulty).status is Status.FAIL
    verdict = check.on(honest)
    assert verdict.status is Status.PASS, verdict.message
    assert CHECKS["forward.bound"].on(honest).status is not Status.FAIL


def test_entries_say_what_they_are() -> None:
    for mutant in MUTANTS.values():
        assert mutant.fault
        assert mutant.exposed_by
        assert mutant.letter in "ABCDEFHIJKLNPQSTVWX"
        assert mutant.caught_by in CHECKS
        assert re.fullmatch(r"((\S+#\d+)(, \S+#\d+)*)?", mutant.source)
