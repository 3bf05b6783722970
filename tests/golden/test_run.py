"""``golden run``: an exact kernel passes, faulty ones fail, what is not declared is counted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch
from rich.console import Console
from torch import Tensor

from flashcheck.arithmetic import ARITHMETICS, HOPPER, IEEE
from flashcheck.commands.golden import NOTHING
from flashcheck.formats import FP32, FP64, round_nearest
from flashcheck.golden.entry import output_format
from flashcheck.golden.limits import named_arithmetics
from flashcheck.golden.run import COMPUTED, margins, run
from flashcheck.kernel import Capabilities, ForwardResult, Kernel
from flashcheck.oracle import fp64
from flashcheck.problem import OPTIONS, Problem
from tests.golden.conftest import FOLDER

EVERYTHING = Capabilities(
    dtypes=("fp32", "fp16", "bf16", "e4m3", "e5m2"),
    options=OPTIONS,
    causal=("top_left", "bottom_right"),
    value_dim_differs=True,
    gqa=True,
    lse=True,
    empty_rows=True,
    zero_length=True,
    gradients=("dq", "dk", "dv", "dbias", "dsink"),
)


def forward(problem: Problem) -> ForwardResult:
    exact = fp64.forward(problem)
    fmt = output_format(problem.format)
    return ForwardResult(round_nearest(exact.out, fmt).to(fmt.dtype), exact.lse.float())


def backward(problem: Problem, out: Tensor, lse: Tensor) -> Mapping[str, Tensor]:
    exact = fp64.backward(problem, out, lse)
    fmt = output_format(problem.format)
    named = {"dq": exact.dq, "dk": exact.dk, "dv": exact.dv}
    rounded = {name: round_nearest(x, fmt).to(fmt.dtype) for name, x in named.items()}
    wide = {"dbias": exact.dbias, "dsink": exact.dsink}
    return rounded | {name: x.float() for name, x in wide.items() if x is not None}


def declared(problem: Problem):  # type: ignore[no-untyped-def]
    return ARITHMETICS[f"flash.{problem.format}"]


EXACT = Kernel(
    "exact",
    forward,
    backward,
    capabilities=EVERYTHING,
    arithmetic=declared,
    machine=lambda device: IEEE,  # noqa: ARG005  (also where torch's own bf16 products flush)
)


def test_an_exact_kernel_passes_every_group() -> None:
    found = run(EXACT, FOLDER)
    assert found.failures == []
    assert found.judged > 600
    assert set(found.arithmetics) == {f"flash.{fmt}" for fmt in EVERYTHING.dtypes}
    assert max(tally.worst for tally in found.groups.values()) <= 1.0


def faulty_forward(problem: Problem) -> ForwardResult:
    result = forward(problem)
    return ForwardResult(result.out, result.lse * 1.01 if result.lse is not None else None)


def test_a_wrong_log_sum_exp_fails() -> None:
    found = run(replace(EXACT, forward=faulty_forward), FOLDER, ("ordinary",))
    assert len(found.failures) >= 40
    assert all(" lse[" in failure for failure in found.failures)


def faulty_backward(problem: Problem, out: Tensor, lse: Tensor) -> Mapping[str, Tensor]:
    gradients = dict(backward(problem, out, lse))
    gradients["dk"] = gradients["dk"].double().roll(1, -1).to(gradients["dk"].dtype)
    return gradients


def test_a_wrong_gradient_fails() -> None:
    found = run(replace(EXACT, backward=faulty_backward), FOLDER, ("ordinary",))
    assert found.failures
    assert all(" dk[" in failure for failure in found.failures)


def no_nan(problem: Problem) -> ForwardResult:
    result = forward(problem)
    return ForwardResult(result.out.nan_to_num(0.0, 0.0, 0.0), result.lse)


def test_a_swallowed_nan_fails() -> None:
    found = run(replace(EXACT, forward=no_nan), FOLDER, ("nonfinite",))
    assert len(found.failures) >= 20


def test_what_is_not_declared_is_counted() -> None:
    modest = replace(EXACT, capabilities=Capabilities(dtypes=("bf16",), lse=True))
    found = run(modest, FOLDER, ("ordinary", "options"))
    assert found.failures == []
    skipped = sum((t.not_applicable for t in found.groups.values()), start=type(found.arithmetics)())
    assert found.judged + skipped.total() == 40 + 160
    assert skipped["option softcap is not declared"] == 2
    assert skipped["dtype fp16 is not declared"] == 8 + 32


def test_a_coarser_declaration_is_judged_by_its_own_bounds() -> None:
    def coarse(problem: Problem):  # type: ignore[no-untyped-def]
        return replace(declared(problem), exp_error=2.0**-10)

    found = run(replace(EXACT, arithmetic=coarse), FOLDER, ("single_key",))
    assert found.failures == []
    assert set(found.arithmetics) == {COMPUTED}


def test_what_a_named_arithmetic_covers() -> None:
    named = {x.name: x for x in named_arithmetics(FP32)}
    base = ARITHMETICS["flash.fp32"]
    assert set(named) == {"flash.fp32", "flash.fp32.hopper", "eager.fp32"}
    assert named["flash.fp32"].covers(replace(base, block_keys=64, order="ascending"), IEEE)
    assert named["flash.fp32"].covers(replace(base, scale_placement="scores"), replace(IEEE, name="other"))
    assert not named["flash.fp32"].covers(base, HOPPER)
    assert named["flash.fp32.hopper"].covers(base, HOPPER)
    assert not named["flash.fp32"].covers(replace(base, exp_error=2.0**-10), IEEE)


INF, NAN = torch.inf, torch.nan


@pytest.mark.parametrize(
    ("got", "exact", "bound", "legal", "expected"),
    [
        (1.0, 1.0, 0.0, False, 0.0),
        (1.5, 1.0, 1.0, False, 0.5),
        (1.5, 1.0, 0.25, False, 2.0),
        (1.5, 1.0, INF, False, 0.0),
        (NAN, 1.0, 1.0, False, INF),
        (NAN, 1.0, 1.0, True, 0.0),
        (INF, 1.0, INF, False, 0.0),
        (NAN, NAN, INF, False, 0.0),
        (INF, NAN, INF, False, 0.0),
        (0.0, NAN, INF, False, INF),
        (INF, INF, INF, False, 0.0),
        (-INF, INF, INF, False, INF),
        (NAN, INF, INF, False, 0.0),
        (-INF, -INF, 0.0, False, 0.0),
        (NAN, -INF, 0.0, False, INF),
        (-1e38, -INF, 0.0, False, INF),
    ],
)
def test_margins(got: float, exact: float, bound: float, legal: bool, expected: float) -> None:
    numbers = (torch.tensor([x], dtype=FP64.dtype) for x in (got, exact, bound))
    assert float(margins(*numbers, torch.tensor([legal]), torch.tensor([False]))) == expected


@pytest.mark.parametrize(("got", "bound", "expected"), [(0.0, INF, 0.0), (0.0, 1.0, INF), (INF, 1.0, 0.0)])
def test_a_number_past_float64_is_judged_by_its_bound(got: float, bound: float, expected: float) -> None:
    numbers = (torch.tensor([x], dtype=FP64.dtype) for x in (got, INF, bound))
    assert float(margins(*numbers, torch.tensor([False]), torch.tensor([True]))) == expected


def test_nothing_judged_is_not_a_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    from flashcheck import loading
    from flashcheck.commands.golden import run_kernel

    lonely = replace(EXACT, capabilities=Capabilities(dtypes=("fp16",), head_dim=(256, 256)))
    monkeypatch.setattr(loading, "load", lambda _: lonely)
    console = Console(quiet=True)
    assert run_kernel("lonely", FOLDER, ("ordinary",), "cpu", console, console) == NOTHING
