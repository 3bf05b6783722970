"""special.empty_rows_backward: 0 is owed, except where the way to it leaves the range of fp32."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from flashcheck.checks import Judged, Status, check_named
from flashcheck.inputs.spec import ProblemSpec
from flashcheck.kernel import Kernel
from flashcheck.loading import load
from flashcheck.mutants import control
from flashcheck.problem import Problem

CHECK = check_named("special.empty_rows_backward")
UNSEEN = ProblemSpec(
    num_heads=3, num_kv_heads=3, num_queries=2, num_keys=15, causal="top_left", family="format_maxima", seed=7
)
"""Keys from 2 on are seen by no row; dO V passes fp32's largest number for them too."""

EMPTY = replace(UNSEEN, num_queries=15, num_keys=4, causal="bottom_right")


@pytest.mark.parametrize("spec", [UNSEEN, EMPTY, replace(EMPTY, causal=None, mask="holes")])
@pytest.mark.parametrize("name", ["torch.sdpa.math", "emulator.eager.fp32", "emulator.flash.fp32"])
@pytest.mark.parametrize("seed", range(4))
def test_a_product_past_the_range_may_leave_nan(name: str, spec: ProblemSpec, seed: int) -> None:
    """Point 7 of the contract: an eager backward multiplies an infinite dP by P = 0."""
    kernel = load(name)
    problem = replace(spec, seed=seed).build()
    if kernel.capabilities.refuses(problem) is None:
        record = CHECK(kernel, problem)
        assert not record.failed, record


def adding(value: float, where: str) -> Kernel:
    """The control with ``value`` in the gradients of keys (dk, dv) or rows (dq) that nobody sees."""
    honest = control()
    assert honest.backward is not None

    def backward(problem: Problem, out: Tensor, lse: Tensor) -> Mapping[str, Tensor]:
        assert honest.backward is not None
        got = dict(honest.backward(problem, out, lse))
        visible = problem.visible()
        lonely = ~(visible.any(-1) if where == "dq" else visible.any(-2))
        got[where] = torch.where(lonely.unsqueeze(-1), value, got[where])
        return got

    return replace(honest, backward=backward)


@pytest.mark.parametrize(("spec", "where"), [(UNSEEN, "dk"), (UNSEEN, "dv"), (EMPTY, "dq")])
def test_anything_else_is_a_failure(spec: ProblemSpec, where: str) -> None:
    """A finite number always; NaN too, where nothing on the way leaves the range."""
    assert CHECK(adding(1e-30, where), spec.build()).failed
    ordinary = replace(spec, family="normal").build()
    assert CHECK(adding(torch.nan, where), ordinary).failed
    assert CHECK(adding(1e-30, where), ordinary).failed
    judged = Judged(control(), ordinary)
    assert CHECK.on(judged).status is Status.PASS
