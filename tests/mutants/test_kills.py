"""How long faults live under certify's plan, and the smallest loss of precision that is caught."""

from __future__ import annotations

import math
from dataclasses import asdict, replace

import pytest
import torch

from flashcheck import kills
from flashcheck.certify import certify
from flashcheck.formats import FP16, FP32
from flashcheck.grades import accuracy_plan, grade
from flashcheck.inputs.spec import ProblemSpec
from flashcheck.kernel import Kernel
from flashcheck.kills import Kill, hunt, hunt_mutants, implied, lives
from flashcheck.mutants import control, mutant_named
from flashcheck.mutants.losses import LOSSES, Graded, Loss, lossy_kernel
from flashcheck.mutants.registry import kernel_with
from flashcheck.plan import Plan, make_plan


def test_a_fault_is_hunted_in_the_order_of_the_plan() -> None:
    (kill,) = hunt_mutants([mutant_named("scale-wrong")], "quick")
    plan = make_plan(control(), "quick")
    assert kill.killed
    assert kill.planned == len(plan.cases)
    assert kill.spec is not None
    specs = [case.spec for case in plan.cases]
    assert specs.index(ProblemSpec.from_json(kill.spec)) == kill.cases - 1


def two_problems(kernel: Kernel, level: str) -> Plan:
    return make_plan(kernel, level, ("bf16",), max_cases=2)


def test_an_honest_kernel_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kills, "make_plan", two_problems)
    kill = hunt("none", "S", control(), control(), "quick")
    assert (kill.killed, kill.check, kill.cases, kill.planned) == (False, "", 2, 2)


def test_a_check_that_rejects_the_honest_kernel_too_kills_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kills, "make_plan", two_problems)
    faulty = mutant_named("scale-wrong").make()
    kill = hunt("scale-wrong", "S", faulty, faulty, "quick")
    assert kill.check
    assert kill.false_alarm
    assert not kill.killed


def test_a_failure_that_a_larger_plan_holds_is_not_met_twice() -> None:
    plan = make_plan(control(), "standard")
    case = plan.cases[40]
    met = Kill("m", "S", "quick", case.checks[0], case.spec.to_json(), 3, 9, 1.0, False)
    known = implied(met, plan)
    assert known is not None
    assert (known.level, known.cases, known.planned, known.seconds) == ("standard", 41, len(plan.cases), None)
    assert lives([known]).timed == 0
    assert math.isnan(lives([known]).worst_seconds)
    assert implied(replace(met, check="no such check"), plan) is None
    assert implied(replace(met, spec=replace(case.spec, seed=0).to_json()), plan) is None
    assert implied(replace(met, false_alarm=True), plan) is None
    assert Kill.from_json(asdict(known) | {"killed": True}) == known


def test_lives_are_summed_up_over_the_killed() -> None:
    def kill(seconds: float, check: str) -> Kill:
        return Kill("m", "S", "quick", check, None, 1, 1, seconds, False)

    sums = lives([kill(1.0, "a"), kill(3.0, "a"), kill(100.0, "")])
    assert (sums.killed, sums.total, sums.timed, sums.median_seconds, sums.worst_seconds) == (
        2,
        3,
        2,
        2.0,
        3.0,
    )


def test_a_run_that_stops_at_the_first_failure_says_so() -> None:
    plan = make_plan(control(), "quick", ("bf16",), max_cases=3)
    outcome = certify(mutant_named("scale-wrong").make(), plan, stop_at_first=True)
    assert outcome.judged < 3
    assert outcome.stopped.startswith("a check failed on problem")
    assert outcome.findings


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_a_loss_is_reached_and_changes_the_result(loss: Loss) -> None:
    on = Graded(loss, loss.sizes(FP32)[0])
    kernel, honest = kernel_with("lossy", on), control()
    problem = ProblemSpec(num_keys=40, num_heads=1).build()
    problem = problem.replaced(dout=torch.ones_like(problem.q))
    results = [k.forward(problem) for k in (kernel, honest)]
    assert kernel.backward is not None
    assert honest.backward is not None
    out, lse = results[1].out, results[1].lse
    assert lse is not None
    pairs = [(results[0].out, out), (results[0].lse, lse)]
    gradients = [k(problem, out, lse) for k in (kernel.backward, honest.backward)]
    pairs += [(gradients[0][name], gradients[1][name]) for name in ("dq", "dk", "dv")]
    assert on.hits[loss.name]
    assert not all(torch.equal(a, b) for a, b in pairs if a is not None)


def test_the_smallest_loss_is_caught_and_the_next_smaller_passes() -> None:
    whole = accuracy_plan("fp16", "quick")
    plan = replace(whole, cases=whole.cases[:4])
    loss = LOSSES["log2e"]
    found = grade(loss, FP16, plan)
    assert found.smallest is not None
    assert found.passes == found.smallest + 1
    assert certify(lossy_kernel(loss, found.smallest), plan).findings
    assert not certify(lossy_kernel(loss, found.passes), plan).findings
