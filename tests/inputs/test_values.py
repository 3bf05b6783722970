"""Value families: deterministic, exact values of the format, and what their names promise."""

from __future__ import annotations

import math

import pytest
import torch

from flashcheck.errors import UnknownNameError
from flashcheck.formats import FORMATS, FP32, Format, is_representable
from flashcheck.inputs.sizes import Sizes
from flashcheck.inputs.spec import ProblemSpec
from flashcheck.inputs.values import FAMILIES, family_named, values
from flashcheck.oracle import fp64

ALL = [f for f in FORMATS.values() if f.name != "fp64"]


def sizes(fmt: Format, scale: float = 0.25, **changes: int) -> Sizes:
    shape = dict(batch=2, num_heads=4, num_kv_heads=2, num_queries=17, num_keys=33, head_dim=16, value_dim=8)
    return Sizes(**(shape | changes), scale=scale, format=fmt)


@pytest.mark.parametrize("name", list(FAMILIES))
@pytest.mark.parametrize("fmt", ALL, ids=str)
def test_values_are_finite_values_of_the_format(name: str, fmt: Format) -> None:
    s = sizes(fmt)
    for x, shape in zip(values(name, s, 3), (s.q_shape, s.k_shape, s.v_shape), strict=True):
        assert tuple(x.shape) == shape
        assert bool(torch.isfinite(x).all())
        assert bool(is_representable(x, fmt).all())
        assert torch.equal(x.to(fmt.dtype).double(), x)


@pytest.mark.parametrize("name", list(FAMILIES))
def test_values_follow_from_the_seed(name: str) -> None:
    first, again, other = (values(name, sizes(FP32), seed) for seed in (1, 1, 2))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


@pytest.mark.parametrize("name", list(FAMILIES))
@pytest.mark.parametrize("edge", [{"num_keys": 0}, {"num_keys": 1, "num_queries": 1}, {"head_dim": 1}])
@pytest.mark.parametrize("scale", [0.0, -0.125])
def test_values_exist_at_the_edges(name: str, edge: dict[str, int], scale: float) -> None:
    for x in values(name, sizes(FP32, scale, **edge), 0):
        assert bool(torch.isfinite(x).all())


def test_unknown_families_are_named() -> None:
    with pytest.raises(UnknownNameError, match=r"did you mean normal"):
        family_named("norml")


def row_max(name: str, dtype: str, seed: int = 0) -> torch.Tensor:
    problem = ProblemSpec(dtype=dtype, num_queries=20, num_keys=20, family=name, seed=seed).build()
    return fp64.forward(problem).row_max


def test_extreme_logits_reach_the_end_of_the_wide_formats_and_stay_finite() -> None:
    tops = [float(row_max("extreme_logits", "bf16", seed).max()) for seed in range(12)]
    assert max(tops) > 1e29
    assert max(tops) < FP32.max_finite


def test_overflowing_logits_pass_the_end_of_fp32() -> None:
    assert float(row_max("overflowing_logits", "bf16").max()) > FP32.max_finite


def test_very_negative_logits_are_all_very_negative() -> None:
    assert float(row_max("very_negative", "fp32").max()) < -1e4


def test_one_hot_rows_are_one_hot() -> None:
    problem = ProblemSpec(num_queries=20, num_keys=20, head_dim=64, value_dim=8, family="one_hot").build()
    assert float(fp64.forward(problem).probabilities.amax(-1).min()) > 1 - 1e-12


def test_ties_are_ties() -> None:
    problem = ProblemSpec(num_queries=4, num_keys=20, family="ties").build()
    scores = fp64.forward(problem).scores
    assert torch.equal(scores[..., :5], scores[..., 5:10])


def test_mixed_gives_every_head_its_own_family() -> None:
    q, _, _ = values("mixed", sizes(FP32, num_heads=8, num_kv_heads=8), 1)
    spread = {round(math.log10(float(q[b, h].abs().max())), 1) for b in range(2) for h in range(8)}
    assert len(spread) > 4
