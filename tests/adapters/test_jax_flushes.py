"""XLA takes subnormal numbers for zero on a CPU: its attentions declare so."""

from __future__ import annotations

import pytest

from flashcheck.checks import CHECKS, Judged
from flashcheck.inputs.spec import ProblemSpec
from flashcheck.loading import load

pytest.importorskip("jax")


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("name", ["jax.dot_product_attention", "jax.pallas.mha"])
def test_subnormal_values_are_no_fault(name: str, dtype: str) -> None:
    problem = ProblemSpec(dtype=dtype, num_queries=16, num_keys=16, head_dim=16, value_dim=16).build()
    small = (problem.v.double() * 2.0**-129).to(problem.v.dtype)
    judged = Judged(load(name), problem.replaced(v=small))
    for check in ("forward.bound", "forward.algorithm", "backward.bound"):
        record = CHECKS[check].on(judged)
        assert not record.failed, record.message
    exact, got = judged.exact.out.abs(), judged.result.out.double().abs()
    assert bool(((got == 0) & (exact > 2.0**-133)).any()), "nothing was flushed: the declaration can go"
