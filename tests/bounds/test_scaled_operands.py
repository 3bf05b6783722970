"""q and k that are subnormal once they carry sqrt(scale): their rounding is absolute, and dS may be large."""

import pytest

from flashcheck.arithmetic import ARITHMETICS, HOPPER, IEEE
from flashcheck.bounds.gradient_sums import GradientSum
from tests.bounds.honest import margins, problem

SMALL = 40 * 2.0**-149
"""Numbers of few bits: what a rounding to 2^-149 takes is a large part of them."""


def made(tensor: str, gradient: float, scale: float):
    sizes = tuple(SMALL if name == tensor else 1.0 for name in "qkv")
    p = problem("fp32", lengths=(15, 21), seed=4, sizes=sizes, scale=scale, causal="bottom_right")
    return p.replaced(dout=p.dout * gradient)


@pytest.mark.parametrize("machine", [IEEE, HOPPER], ids=lambda m: m.name)
@pytest.mark.parametrize("scale", [0.25, -0.11, 0.9, 3.0])
@pytest.mark.parametrize("gradient", [2.0**-20, 1.0, 1000.0])
@pytest.mark.parametrize("tensor", ["q", "k"])
def test_honest_kernels_stay_inside(tensor, gradient, scale, machine):
    worst = margins(made(tensor, gradient, scale), ARITHMETICS["eager.fp32"], machine)
    assert max(worst.values()) <= 1, worst


@pytest.mark.parametrize(("tensor", "gradient"), [("q", "dk"), ("k", "dq")])
def test_the_term_is_needed(tensor, gradient, monkeypatch):
    monkeypatch.setattr(GradientSum, "_subnormal_scaled", lambda *_: 0.0)
    worst = margins(made(tensor, 1000.0, 0.11), ARITHMETICS["eager.fp32"], IEEE)
    assert worst[gradient] > 1
