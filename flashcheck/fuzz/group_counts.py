"""How many findings one seeded fault makes: the rule "one bug is one finding", counted.

Random problems, as campaigns draw them. Those on which the faulty kernel returns the control's very bits
are passed over unjudged: they cannot fail. The rest are judged in turn, what is known already goes by.
"""

from __future__ import annotations

import random
import time
from typing import Any

import torch

from flashcheck.checks.bits import differing
from flashcheck.fuzz.case import FuzzCase
from flashcheck.fuzz.groups import Failure, Group, group_of
from flashcheck.fuzz.judge import extra_checks, forward_checks, judge_case
from flashcheck.inputs.combinations import is_legal
from flashcheck.inputs.problems import draw_spec
from flashcheck.inputs.spec import ProblemSpec
from flashcheck.kernel import Kernel
from flashcheck.mutants import MUTANTS
from flashcheck.mutants.registry import control

LARGEST = 129

_Known = tuple[Group, Failure, FuzzCase]


def groups_of(name: str, seed: int, failures: int, draws: int, seconds: float) -> dict[str, Any]:
    """Groups that a mutant's first ``failures`` failing problems fall into.

    Ends early after ``draws`` problems or ``seconds``.
    """
    mutant = MUTANTS[name]
    kernel, honest = mutant.make(), control(mutant.splits, mutant.tiling_known)
    rng = random.Random(seed)
    extras = extra_checks(kernel.backward is not None)
    known: list[_Known] = []
    started, failed, drawn = time.process_time(), 0, 0
    while failed < failures and drawn < draws and time.process_time() - started < seconds:
        drawn += 1
        spec = draw_spec(rng, kernel.capabilities, rng.choice(kernel.capabilities.dtypes), drawn)
        if max(spec.num_queries, spec.num_keys) > LARGEST or not is_legal(spec, kernel.capabilities):
            continue
        more = rng.choice(extras)
        backward = any(n.startswith("backward") for n in more)
        if not _differs(kernel, honest, spec, backward):
            continue
        case = FuzzCase(spec, (*forward_checks(), *more))
        report = judge_case(kernel, case, known=[g for g, _, _ in known])
        failed += report.failure is not None or bool(report.masked)
        if report.failure is not None:
            known = _told(kernel, known, case, report.failure)
    return {
        "mutant": name,
        "groups": len(known),
        "failures": failed,
        "drawn": drawn,
        "findings": [
            {
                "check": f.check,
                "classes": list(g.classes),
                "looks": list(g.looks),
                "message": f.message,
                "guesses": list(f.guesses),
            }
            for g, f, _ in known
        ],
    }


def _told(kernel: Kernel, known: list[_Known], case: FuzzCase, failure: Failure) -> list[_Known]:
    """The findings after one more, merged as a campaign's directory merges them."""
    new = group_of(failure, ())
    kept = []
    for group, old, first in known:
        if group.holds(failure) or new.holds(old):
            new = new.joined(old)
        elif (
            group.looks
            and (again := judge_case(kernel, first, candidates=(new,)).failure)
            and new.holds(again)
        ):
            new = new.joined(again)
        else:
            kept.append((group, old, first))
    return [*kept, (new, failure, case)]


def _differs(kernel: Kernel, honest: Kernel, spec: ProblemSpec, backward: bool) -> bool:
    problem = spec.build()
    try:
        one, other = kernel.forward(problem), honest.forward(problem)
        if bool(differing(one.out, other.out).any()):
            return True
        if one.lse is not None and other.lse is not None and bool(differing(one.lse, other.lse).any()):
            return True
        if not backward or kernel.backward is None or honest.backward is None or other.lse is None:
            return False
        shape = (problem.batch, problem.num_heads, problem.num_queries, problem.value_dim)
        if problem.dout is None:
            generator = torch.Generator().manual_seed(problem.seed + 1)
            dout = torch.randn(shape, generator=generator, dtype=torch.float64).to(other.out.dtype)
            problem = problem.replaced(dout=dout)
        a = kernel.backward(problem, other.out, other.lse)
        b = honest.backward(problem, other.out, other.lse)
        return any(bool(differing(a[n], b[n]).any()) for n in b)
    except Exception:
        return True
