"""Every rule can reject and can accept: an all-zero output and the exact result, rounded."""

from __future__ import annotations

import pytest
import torch

from flashcheck.mutants import MUTANTS
from flashcheck.rivals import RULES, Rule, references, rival_matrix
from flashcheck.rivals.inputs import DISTRIBUTIONS, problems


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_a_rule_accepts_the_rounded_exact_result(rule: Rule) -> None:
    p = next(iter(problems(rule.inputs, rule.dtype)))
    exact, eager = references.exact(p), references.eager_in_dtype(p)
    for name in rule.compares:
        got = exact[name].to(torch.float32 if name == "LSE" else rule.dtype).double()
        assert rule.accepts(name, got, exact[name], eager[name], rule.dtype), name


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_a_rule_rejects_large_errors(rule: Rule) -> None:
    p = next(iter(problems(rule.inputs, rule.dtype)))
    exact, eager = references.exact(p), references.eager_in_dtype(p)
    assert not rule.accepts("O", exact["O"] + 3.0, exact["O"], eager["O"], rule.dtype)


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_the_eager_twin_is_near_the_exact_result(name: str) -> None:
    for p in problems(name, torch.float16):
        exact, eager = references.exact(p), references.eager_in_dtype(p)
        for tensor in ("O", "dQ", "dK", "dV"):
            size = exact[tensor].square().mean().sqrt()
            assert (eager[tensor] - exact[tensor]).square().mean().sqrt() < 0.02 * size + 1e-4, tensor


def test_the_matrix_starts_with_the_control_and_has_a_row_per_mutant() -> None:
    rows = rival_matrix([MUTANTS["lost-tile"]])
    assert [row.mutant for row in rows] == ["none", "lost-tile"]
    assert "flash-attention 2" in rows[1].own
