"""The three ways of judging a backward: apart from the forward, on the kernel's own forward, end to end."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from flashcheck.checks import CHECKS, Judged, KernelError, Status
from flashcheck.kernel import ForwardResult
from flashcheck.loading import load
from tests.bounds.honest import problem

MODES = ("backward.bound", "backward.own_forward", "backward.end_to_end")


def verdicts(kernel, p) -> dict[str, Status]:
    judged = Judged(kernel, p)
    return {name: CHECKS[name].on(judged).status for name in MODES}


@pytest.mark.parametrize("name", ["emulator.flash.bf16", "emulator.hopper.flash.fp16", "emulator.flash.e4m3"])
@pytest.mark.parametrize("options", [{}, {"dlse": True}, {"causal": "top_left", "heads": (4, 2)}], ids=str)
def test_an_honest_kernel_passes_all_three(name, options):
    fmt = name.rpartition(".")[2]
    assert set(verdicts(load(name), problem(fmt, seed=3, **options)).values()) == {Status.PASS}


def test_a_fault_of_the_forward_shows_end_to_end_alone():
    honest = load("emulator.flash.bf16")

    def scaled(p):
        result = honest.forward(p)
        return ForwardResult(result.out, result.lse + 0.05)

    got = verdicts(replace(honest, forward=scaled), problem(seed=3))
    assert got == dict(zip(MODES, (Status.PASS, Status.PASS, Status.FAIL), strict=True))


def test_a_backward_that_reads_another_forward_fails_on_its_own():
    """It repeats an honest forward in place of reading what it is given: right on the oracle's values."""
    honest = load("emulator.flash.bf16")

    def off(p):
        result = honest.forward(p)
        return ForwardResult(result.out, result.lse + 0.25)

    def recomputing(p, *_):
        again = honest.forward(p)
        return honest.backward(p, again.out, again.lse)

    got = verdicts(replace(honest, forward=off, backward=recomputing), problem(seed=3))
    assert got == dict(zip(MODES, (Status.PASS, Status.FAIL, Status.PASS), strict=True))


@pytest.mark.parametrize("where", ["arithmetic", "forward", "backward"])
def test_a_kernel_that_faults_is_a_finding(where):
    """Whatever of a kernel raises (a fault on a GPU makes every later call raise): a failed check."""

    def fault(*_):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    kernel = replace(load("emulator.flash.bf16"), **{where: fault})
    record = CHECKS["backward.bound" if where == "backward" else "forward.bound"](kernel, problem())
    assert record.status is Status.FAIL
    assert "illegal memory access" in record.message


def test_copies_to_a_device_that_fail_are_the_kernels_fault(monkeypatch):
    def fault(*_):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    judged = Judged(load("emulator.flash.bf16"), problem())
    assert judged.answers()
    monkeypatch.setattr("flashcheck.checks.judged.on_device", fault)
    with pytest.raises(KernelError, match="illegal memory access"):
        _ = judged.gradients
    fresh = Judged(load("emulator.flash.bf16"), problem())
    assert not fresh.answers()
    assert CHECKS["forward.bound"].on(fresh).status is Status.FAIL


def test_the_gradient_of_lse_is_exercised_and_judged():
    """Every other seed brings one; a backward that drops it is rejected."""
    honest = load("emulator.flash.bf16")

    def deaf(p, out, lse):
        return honest.backward(p.replaced(dlse=None), out, lse)

    p = replace(problem(seed=3), dout=None, seed=5)
    assert Judged(honest, p).gradient_problem.dlse is not None
    assert CHECKS["backward.bound"](honest, p).status is Status.PASS
    assert CHECKS["backward.bound"](replace(honest, backward=deaf), p).status is Status.FAIL
    assert Judged(honest, replace(p, seed=4)).gradient_problem.dlse is None


def test_dscale_of_single_precision_lies_inside_its_bound():
    from flashcheck.arithmetic import IEEE, flash
    from flashcheck.bounds.backward import backward_bound
    from flashcheck.bounds.pairs import Given
    from flashcheck.formats import FP32
    from flashcheck.oracle import fp64

    p = problem("fp32", seed=2)
    exact = fp64.forward(p)
    given = Given(exact.out.float(), exact.lse.float())
    gradients = fp64.backward(p, given.out, given.lse)
    bound = backward_bound(p, exact, gradients, given, flash(FP32), IEEE, with_scale=True).tensors["dscale"]
    q, k, v, dout = p.q, p.k, p.v, p.dout
    raw = q @ k.mT
    weights = torch.exp(raw * p.effective_scale - given.lse.unsqueeze(-1))
    ds = weights * (dout @ v.mT - (dout * given.out).sum(-1, keepdim=True))
    got = (ds * raw).sum()
    assert float(bound.interval.margin(got)) <= 1
    assert float(bound.interval.margin(got * (1 + 2.0**-6))) > 1
