"""Ways to the same numbers in fewer passes over pairs: each against the plain one."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from flashcheck.bounds.gradient_sums import Weights
from flashcheck.bounds.interval import rounded_interval
from flashcheck.bounds.tiling import Tiling
from flashcheck.formats import BF16, FP32, round_nearest
from flashcheck.oracle.common_unit import lowest_bit


def uniform(*shape: int, seed: int = 0) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize(
    ("num_keys", "sink"), [(64, False), (64, True), (50, False), (50, True), (16, False)]
)
@pytest.mark.parametrize("function", [torch.add, torch.mul, Tensor.add_, Tensor.mul_])
def test_what_tiles_share_is_what_their_keys_get(function, num_keys, sink):
    block = 16
    tiles = -(-num_keys // block)
    tiling = Tiling(tiles - 1, None, (block, num_keys))
    keys, shared = uniform(1, 2, 3, num_keys + sink), uniform(1, 2, 3, tiles + sink, seed=1)
    expected = function(keys.clone(), tiling.per_key(shared))
    assert torch.equal(tiling.with_keys(function, keys, shared), expected)


@pytest.mark.parametrize("shares", [(1e-5, 1e-5), (1e-5, 3e-4), (3e-4, 1e-7)])
def test_a_second_share_is_charged_as_the_first(shares):
    size, slack = uniform(1, 1, 40, 40), 1e-9 * uniform(1, 1, 40, 40, seed=1)
    weights = Weights(size, slack)
    for share in (*shares, shares[0]):
        charged, plain = weights.charged(share), slack + share * size
        assert float(((charged - plain).abs() / plain).max()) < 2.0**-40  # THEORY.md 2.5 pays 2^-26


def test_the_lowest_bit_is_the_last_that_is_set():
    powers = 2.0 ** torch.arange(-1022.0, 1020.0, 97.0, dtype=torch.float64)
    numbers = 3 * uniform(200) * 2.0 ** (-40 * uniform(200, seed=1))
    tiny = torch.tensor([0.0, 2.0**-1060, 5 * 2.0**-1060], dtype=torch.float64)
    x = torch.cat([powers, numbers, -round_nearest(numbers, BF16), tiny])
    for value, found in zip(x.tolist(), lowest_bit(x.unsqueeze(-1)).tolist(), strict=True):
        numerator, denominator = abs(value).as_integer_ratio()
        plain = (numerator & -numerator) / denominator
        expected = torch.inf if value == 0 else 0.0 if abs(value) < 2.0**-1022 else plain
        assert found == expected, value
    rows = torch.tensor([[1.5, 0.0, 6.0], [0.0, 0.0, 0.0]], dtype=torch.float64)
    assert lowest_bit(rows).tolist() == [0.5, torch.inf]


def test_an_answer_that_changed_in_place_is_measured_again():
    exact = uniform(2, 3, 4, 5)
    around = rounded_interval(exact, 1e-6 * exact, FP32)
    got = exact.float()
    assert float(around.margin(got).max()) == 0.0
    got[0, 0, 0, 0] += 1.0
    assert float(around.margin(got)[0, 0, 0, 0]) > 1.0
    with torch.inference_mode():
        unversioned = exact.float()
        assert float(around.margin(unversioned).max()) == 0.0
        unversioned[0, 0, 0, 0] += 1.0
        assert float(around.margin(unversioned)[0, 0, 0, 0]) > 1.0


def test_the_bound_of_one_element_is_that_of_all():
    exact = uniform(2, 3, 4, 5)
    around = rounded_interval(exact, torch.where(exact > 0.9, torch.inf, 1e-3 * exact), BF16)
    around = replace(around, exact=torch.where(exact < 0.1, torch.nan, exact))
    for index in torch.ones_like(exact).nonzero().tolist():
        assert around.bound_at(tuple(index)) == float(around.bound[tuple(index)])
