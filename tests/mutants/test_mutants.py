"""Seeded faults are real: the line runs, changes the result, and its check rejects it, not the control."""

from __future__ import annotations

import inspect
import re

import pytest
import torch
from torch import Tensor

from flashcheck.checks import CHECKS, Judged
from flashcheck.checks.fault_classes import FAULT_CLASSES
from flashcheck.checks.record import Status
from flashcheck.mutants import MUTANTS, control, flash, gradients, mutant_named, scores, stores, visibility
from flashcheck.mutants.switches import Switches

ACCURACY = ("forward.bound", "backward.bound", "forward.rms", "backward.rms")

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


RELATIONAL = ("bitwise", "influence", "isolation", "option", "relation", "state")
"""Families of checks that compare runs: their faults may show on no single one."""


def is_relational(check: str) -> bool:
    return check.startswith(RELATIONAL) or check == "special.empty_rows_backward"


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
    check = CHECKS[mutant.caught_by]
    asleep = is_relational(mutant.caught_by)
    if not asleep:
        assert not all(same(a, b) for a, b in pairs), "the fault changes nothing on its exposing input"
    assert check.on(faulty).status is Status.FAIL
    assert switches.hits[name], "the faulty line never ran"
    verdict = check.on(honest)
    assert verdict.status is Status.PASS, verdict.message
    assert CHECKS["forward.bound"].on(honest).status is not Status.FAIL


ALONE = [m.name for m in MUTANTS.values() if is_relational(m.caught_by) or m.caught_by.endswith(".bias")]


@pytest.mark.parametrize("name", ALONE)
def test_accuracy_alone_does_not_see_faults_of_relations(name: str) -> None:
    mutant = mutant_named(name)
    judged = Judged(mutant.make(), mutant.expose()[-1])
    blind = [n for n in ACCURACY if not CHECKS[n].on(judged).failed]
    assert blind == list(ACCURACY)


def test_every_check_has_a_fault_that_it_is_for() -> None:
    """Or a test of its own: for the last four tests/checks/test_shared_faults.py."""
    expected = {m.caught_by for m in MUTANTS.values()}
    elsewhere = {
        "isolation.buffers",  # tests/checks/test_checks_fail.py: reads and writes around the data
        "forward.algorithm",  # golden of the declared tiling: tests/checks/test_checks_fail.py
        "backward.algorithm",
        "backward.own_forward",  # tests/bounds/test_modes.py
        "backward.end_to_end",
        "backward.rms",
        "state.fresh_process",
        "option.effect",
        "relation.gradient_sums",
        "relation.score_gradient",
    }
    assert set(CHECKS) - expected == elsewhere


def test_entries_say_what_they_are() -> None:
    for mutant in MUTANTS.values():
        assert mutant.fault
        assert mutant.exposed_by
        assert mutant.letter in FAULT_CLASSES
        assert mutant.caught_by in CHECKS
        assert re.fullmatch(r"((\S+#\d+)(, \S+#\d+)*)?", mutant.source)
