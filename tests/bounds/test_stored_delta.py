"""A delta that is stored in a narrow format: its rounding is one error for a whole row of dS."""

from __future__ import annotations

from dataclasses import replace

import torch

from flashcheck.arithmetic import flash
from flashcheck.checks import Judged
from flashcheck.checks.rms import RmsTally
from flashcheck.emulator import as_kernel
from flashcheck.formats import BF16, FP32
from flashcheck.kernel import Kernel
from flashcheck.problem import Problem

ARITHMETIC = flash(BF16, grad_score_format=FP32, scaled_grad_score_format=BF16, delta_format=BF16)


def _ratios(kernel: Kernel) -> dict[str, float]:
    """Measured over predicted, of three problems whose keys lie around 2: a row's errors of dS do not cancel
    in dQ."""
    tallies: dict[str, RmsTally] = {}
    for seed in range(3):
        g = torch.Generator().manual_seed(seed)
        q, k, v, dout = (torch.randn(1, 2, 64, 32, generator=g) for _ in range(4))
        p = Problem(q.bfloat16(), (k + 2).bfloat16(), v.bfloat16(), dout=dout.bfloat16())
        for name, measured in Judged(kernel, p).measured_gradients.items():
            tallies.setdefault(name, RmsTally()).add(measured)
    return {name: tally.ratio for name, tally in tallies.items() if tally.ratio is not None}


def test_the_prediction_knows_a_stored_delta() -> None:
    found = _ratios(as_kernel(ARITHMETIC, name="stored delta"))
    for name in ("dQ", "dK", "dV"):
        assert 0.95 < found[name] < 1.05, found
    assert 0.3 < found["dScale"] < 2.0, found  # three numbers: reported only


def test_a_kernel_that_stores_delta_without_saying_so_is_off() -> None:
    kernel = as_kernel(ARITHMETIC, name="stored delta")
    undeclared = replace(kernel, arithmetic=lambda p: replace(kernel.arithmetic(p), delta_format=None))
    assert _ratios(undeclared)["dQ"] > 1.5
