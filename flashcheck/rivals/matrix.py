"""Mutants against rules: killed on the suite's inputs, killed on ours, and alarms on the honest control."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from flashcheck.certify import one_thread
from flashcheck.kernel import Kernel
from flashcheck.mutants import MUTANTS, Mutant, control
from flashcheck.problem import Problem
from flashcheck.rivals import inputs, references
from flashcheck.rivals.rules import RULES, Rule

_NAMES = {"dq": "dQ", "dk": "dK", "dv": "dV"}


@dataclass(frozen=True, slots=True)
class MatrixRow:
    """One mutant (or ``none``, the control): the rules that reject it, by name.

    Attributes:
        own: on the inputs that the rule's suite draws; ours: on the problems that expose the mutant.
    """

    mutant: str
    own: tuple[str, ...]
    ours: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class RuleSummary:
    """What a rule did: mutants killed on its own and on our inputs, and on whose it rejects the control."""

    rule: Rule
    own: int
    ours: int
    rejects_control: str


def summarised(matrix: list[MatrixRow]) -> list[RuleSummary]:
    """A line per rule of a matrix whose first row is the control."""
    honest, mutants = matrix[0], matrix[1:]
    lines = []
    for rule in RULES:
        own = sum(rule.name in row.own for row in mutants)
        ours = sum(rule.name in row.ours for row in mutants)
        sides = [
            side for side, names in (("its own", honest.own), ("our", honest.ours)) if rule.name in names
        ]
        lines.append(RuleSummary(rule, own, ours, f"on {' and '.join(sides)} inputs" if sides else "no"))
    return lines


def rival_matrix(
    mutants: Iterable[Mutant] | None = None,
    on_row: Callable[[MatrixRow], None] = lambda _: None,
) -> list[MatrixRow]:
    """The control first (rules that reject it raise false alarms), then every mutant."""
    rows: list[MatrixRow] = []
    chosen = tuple(MUTANTS.values() if mutants is None else mutants)
    with one_thread():
        exposing = tuple(p for m in chosen for p in m.expose()[-1:])
        jobs = [("none", control(), exposing)] + [(m.name, m.make(), m.expose()) for m in chosen]
        for name, kernel, ours in jobs:
            own = tuple(r.name for r in RULES if _rejects_any(r, kernel, _own(r.inputs, r.dtype)))
            judged = ours if name == "none" else ours[-1:]
            for earlier in () if name == "none" else ours[:-1]:
                kernel.forward(earlier)
            rows.append(MatrixRow(name, own, tuple(r.name for r in RULES if _rejects_any(r, kernel, judged))))
            on_row(rows[-1])
            _results.cache_clear()
    return rows


@cache
def _own(distribution: str, dtype: torch.dtype) -> tuple[Problem, ...]:
    return tuple(inputs.problems(distribution, dtype))


def _rejects_any(rule: Rule, kernel: Kernel, problems: Iterable[Problem]) -> bool:
    return any(_rejects(rule, kernel, problem) for problem in problems)


def _rejects(rule: Rule, kernel: Kernel, problem: Problem) -> bool:
    got = _results(kernel, problem)
    if got is None:  # it raised, or returned another shape: any suite sees that
        return True
    exact, eager = _expected(problem)
    for name in rule.compares:
        seen = (
            torch.isfinite(exact[name]) if name == "LSE" else torch.ones_like(exact[name], dtype=torch.bool)
        )
        a, b, c = (x[name].where(seen, 0.0) for x in (got, exact, eager))
        if not bool(a.isfinite().all()) and bool(b.isfinite().all()):
            return True
        if not rule.accepts(name, a, b, c, problem.q.dtype):
            return True
    return False


@cache
def _results(kernel: Kernel, problem: Problem) -> dict[str, Tensor] | None:
    """Forward, and the backward of its own forward, as suites that use autograd run them."""
    problem = _with_gradient(problem)
    assert kernel.backward is not None
    try:
        result = kernel.forward(problem)
        assert result.lse is not None
        gradients = kernel.backward(problem, result.out, result.lse)
    except Exception:  # a mutant may break in any way
        return None
    out = {"O": result.out, "LSE": result.lse}
    return {
        name: x.detach().double()
        for name, x in (out | {_NAMES[n]: g for n, g in gradients.items() if n in _NAMES}).items()
    }


@cache
def _expected(problem: Problem) -> tuple[references.Results, references.Results]:
    problem = _with_gradient(problem)
    return references.exact(problem), references.eager_in_dtype(problem)


def _with_gradient(problem: Problem) -> Problem:
    if problem.dout is not None:
        return problem
    g = torch.Generator().manual_seed(problem.seed + 1)
    shape = (problem.batch, problem.num_heads, problem.num_queries, problem.value_dim)
    return problem.replaced(dout=torch.randn(shape, generator=g, dtype=torch.float64).to(problem.q.dtype))
