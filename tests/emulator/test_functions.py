"""Special functions stay within a machine's allowance, use most of it, and depend on the argument only."""

from __future__ import annotations

import math

import pytest
import torch

from flashcheck.arithmetic import HOPPER, IEEE, Machine
from flashcheck.emulator import functions

MACHINES = [IEEE, HOPPER]


@pytest.mark.parametrize("machine", MACHINES, ids=lambda m: m.name)
@pytest.mark.parametrize("base", [2.0, math.e])
def test_exponential(machine: Machine, base: float) -> None:
    x = -torch.linspace(0, 80, 200_001)
    got = functions.exponential(x, machine, base=base, error=None, exact_at_zero=True)
    relative = got.double() / torch.pow(base, x.double()) - 1
    assert float(got[0]) == 1.0
    assert relative.abs().max() <= machine.exp_error
    assert relative.abs().max() >= 0.8 * machine.exp_error


def test_exponential_of_the_kernels_own_may_miss_one() -> None:
    zero = torch.zeros(1)
    got = functions.exponential(zero, IEEE, base=2.0, error=2.0**-13, exact_at_zero=False)
    assert 0 < abs(float(got) - 1) <= 2.0**-13


def test_exponential_flushes_small_results_to_zero() -> None:
    x = torch.tensor([-125.0, -127.0, -torch.inf, torch.nan])
    got = functions.exponential(x, HOPPER, base=2.0, error=None, exact_at_zero=True)
    assert got[0] > 0
    assert got[1] == got[2] == 0
    assert torch.isnan(got[3])


@pytest.mark.parametrize("machine", MACHINES, ids=lambda m: m.name)
def test_logarithm(machine: Machine) -> None:
    x = torch.cat([torch.linspace(0.5, 2, 100_001), torch.logspace(-30, 30, 100_001)])
    got = functions.logarithm(x, machine).double()
    exact = torch.log(x.double())
    allowed = torch.clamp(machine.log_relative * exact.abs(), min=machine.log_absolute)
    share = (got - exact).abs() / allowed
    assert share.max() <= 1
    assert share.max() > 0.8
    assert float(functions.logarithm(torch.ones(1), machine)) == 0.0
    assert float(functions.logarithm(torch.zeros(1), machine)) == -torch.inf


@pytest.mark.parametrize("machine", MACHINES, ids=lambda m: m.name)
def test_division(machine: Machine) -> None:
    x = torch.logspace(-5, 5, 100_001)
    y = torch.linspace(-3, 3, 100_001)
    got = (y * functions.reciprocal(x, machine)).double()
    exact = y.double() / x.double()
    assert ((got - exact).abs() <= machine.division_error * exact.abs()).all()


@pytest.mark.parametrize("machine", MACHINES, ids=lambda m: m.name)
def test_tanh(machine: Machine) -> None:
    x = torch.linspace(-10, 10, 100_001)
    got = functions.tanh(x, machine).double()
    assert (got - torch.tanh(x.double())).abs().max() <= machine.tanh_error
    assert got.abs().max() <= 1
    assert float(functions.tanh(torch.zeros(1), machine)) == 0.0


def test_same_argument_same_error() -> None:
    x = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    one = functions.exponential(x, HOPPER, base=2.0, error=None, exact_at_zero=True)
    shuffled = torch.randperm(1000, generator=torch.Generator().manual_seed(1))
    other = functions.exponential(x[shuffled], HOPPER, base=2.0, error=None, exact_at_zero=True)
    assert torch.equal(one[shuffled], other)
