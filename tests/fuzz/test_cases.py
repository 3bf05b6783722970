"""A case as data is the same case: bits, sizes, names."""

from __future__ import annotations

import json
import random

import pytest
import torch

from flashcheck.checks.bits import differing
from flashcheck.errors import ArgumentError
from flashcheck.fuzz.case import FuzzCase, problem_from_json, problem_to_json
from flashcheck.fuzz.groups import Failure, group_of
from flashcheck.inputs.problems import draw_spec
from flashcheck.inputs.spec import ProblemSpec
from flashcheck.mutants.registry import CAPABILITIES


@pytest.mark.parametrize("seed", range(12))
def test_problems_survive_json_to_the_bit(seed: int) -> None:
    rng = random.Random(seed)
    spec = draw_spec(rng, CAPABILITIES, rng.choice(("fp16", "bf16", "fp32")), seed)
    problem = spec.build()
    problem.v[..., :1] = torch.nan
    back = problem_from_json(json.loads(json.dumps(problem_to_json(problem))))
    assert back.options() == problem.options()
    assert back.effective_scale == problem.effective_scale
    for name in ("q", "k", "v", "mask", "bias", "sink", "alibi_slopes", "key_lengths"):
        a, b = getattr(problem, name), getattr(back, name)
        assert (a is None) == (b is None)
        if a is not None:
            assert a.dtype == b.dtype
            assert not bool(differing(a, b).any()), name


def test_cases_survive_json() -> None:
    problem = ProblemSpec(dtype="bf16", num_keys=3, causal="top_left").build()
    for tensors in (None, json.dumps(problem_to_json(problem))):
        case = FuzzCase(ProblemSpec(dtype="bf16", window=(3, None)), ("forward.bound",), tensors)
        back = FuzzCase.from_json(json.loads(json.dumps(case.to_json())))
        assert back == case
        assert back.key == case.key
    with pytest.raises(ArgumentError, match="format_version"):
        FuzzCase.from_json(case.to_json() | {"format_version": 99})


def test_fewer_tokens_sort_first() -> None:
    def size(**changes: object) -> tuple[int, ...]:
        return FuzzCase(ProblemSpec(**changes), ()).size  # type: ignore[arg-type]

    assert size(num_queries=1) < size() < size(num_queries=17)
    assert size() < size(num_heads=2)
    assert size() < size(causal="top_left")
    assert size(num_queries=2, num_heads=8) < size(num_queries=16)


def test_a_diagnosed_class_is_one_bug_whichever_check_shows_it() -> None:
    a = Failure("forward.bound", "O", "m", faults=("lost", "scale"))
    b = Failure("special.empty_rows", "O", "n", faults=("lost", "causal"))
    c = Failure("forward.bound", "O", "m", faults=("causal",))
    first = group_of(a, ())
    assert group_of(b, [first]) is first
    assert group_of(c, [first]) != first
    narrow = first.joined(b)
    assert narrow.classes == ("lost",)
    assert narrow.joined(c).classes == ("lost",)  # never without a class


def test_looks_group_what_no_class_proves() -> None:
    """Few wrong elements fit classes by chance: their looks count too. Many prove a class alone."""
    plain = Failure("backward.bound", "dQ", "m", looks=("through dS",))
    chance = Failure("backward.bound", "dV", "n", faults=("by chance",), looks=("through dS", "dV"))
    proved = Failure("backward.bound", "dQ", "m", faults=("the scale",))
    group = group_of(plain, ())
    assert group.holds(chance)
    assert not group.holds(proved)
    wider = group.joined(chance)
    assert wider.holds(Failure("backward.end_to_end", "dV", "o", looks=("dV",)))
    assert not group_of(proved, ()).joined(chance).looks  # what is proved is not known by its looks


def test_a_finding_gives_way_to_a_stronger_check() -> None:
    weak = group_of(Failure("forward.algorithm", "O", "m", looks=("O",)), ())
    strong = Failure("forward.bound", "O", "n", looks=("O",))
    assert weak.holds(strong)
    assert weak.yields_to(strong)
    assert not group_of(strong, ()).yields_to(Failure("forward.algorithm", "O", "m", looks=("O",)))


def test_without_a_diagnosis_and_a_look_the_message_decides() -> None:
    def failure(message: str) -> Failure:
        return Failure("forward.bound", "", message)

    group = group_of(failure("the kernel raised IndexError: 3 of 7"), ())
    assert group.holds(failure("the kernel raised IndexError: 12 of 30"))
    assert not group.holds(failure("the kernel raised KeyError: 3 of 7"))
    assert not group.holds(Failure("backward.bound", "", "the kernel raised IndexError: 3 of 7"))
    assert len(group.id) == 8
