"""Repros stand alone: they run without flashcheck where the kernel does, fail as it failed, and heal."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from flashcheck.fuzz.case import FuzzCase, problem_to_json
from flashcheck.fuzz.confirm import with_script
from flashcheck.fuzz.groups import group_of
from flashcheck.fuzz.runner import InProcessRunner
from flashcheck.fuzz.script import literal
from flashcheck.fuzz.store import Finding
from flashcheck.inputs.spec import ProblemSpec
from flashcheck.kernel import Kernel
from flashcheck.loading import load
from flashcheck.mutants import MUTANTS

PLAIN = """
import torch

HEALED = False


def attention(q, k, v, *, is_causal=False, scale=None):
    scores = q.float() @ k.float().mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1 if HEALED else 2)
        scores = scores.masked_fill(hidden, -torch.inf)
    return (scores.softmax(-1) @ v.float()).to(q.dtype)
"""


def _finding(runner: Any, name: str, case: FuzzCase) -> Finding:
    failure = runner.judge(case).failure
    assert failure is not None
    return Finding(name, "cpu", group_of(failure, ()), failure, case, case)


def test_a_users_function_needs_torch_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    module = tmp_path / "mine.py"
    module.write_text(PLAIN)
    name = "mine.py:attention"
    kernel = replace(load(name), name=name)
    case = FuzzCase(
        ProblemSpec(dtype="bf16", causal="top_left", num_queries=3, num_keys=4), ("forward.bound",)
    )
    finding = with_script(_finding(InProcessRunner(kernel), name, case), InProcessRunner(kernel), tmp_path)
    path = tmp_path / f"test_{finding.id}.py"
    assert finding.script == f"python {path}"
    text = path.read_text()
    assert "flashcheck" not in text.partition('"""\n\nimport os')[2]
    assert "mpmath" in text

    _run(path, pytest.raises(AssertionError, match="accepted"))
    module.write_text(PLAIN.replace("HEALED = False", "HEALED = True"))
    _run(path, contextlib.nullcontext())


def _run(path: Path, expected: contextlib.AbstractContextManager[Any]) -> None:
    """Runs the file's test in this process: starting one takes seconds."""
    space: dict[str, Any] = {"__file__": str(path), "__name__": "repro"}
    exec(compile(path.read_text(), str(path), "exec"), space)
    (test,) = (value for key, value in space.items() if key.startswith("test_"))
    with expected:
        test()


KINDS = sorted({m.caught_by for m in MUTANTS.values() if not m.caught_by.endswith(".rms")})


@pytest.mark.parametrize("check", KINDS)
def test_every_check_has_a_repro_that_fails(
    check: str, in_process: Callable[[Kernel], InProcessRunner], tmp_path: Path
) -> None:
    """On the mutant that the audit names for the check, the text compiles and its test fails."""
    mutant = next(m for m in MUTANTS.values() if m.caught_by == check)
    name = f"flashcheck.fuzz.mutant_kernels:{mutant.name.replace('.', '__')}"
    kernel = replace(mutant.make(), name=name)
    runner = in_process(kernel)
    tensors = json.dumps(problem_to_json(mutant.expose()[-1]))
    finding = _finding(runner, name, FuzzCase(ProblemSpec(dtype="bf16"), (check,), tensors))
    finding = Finding.from_json(json.loads(json.dumps(finding.to_json())))
    (tmp_path / f"{finding.id}.json").write_text(json.dumps(finding.to_json()))
    path = tmp_path / f"test_{finding.id}.py"
    path.write_text(runner.script(finding.case, finding.failure, finding.id))
    _run(path, pytest.raises(AssertionError))


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.bool, torch.int64]
)
def test_literals_read_back_to_the_bit(dtype: torch.dtype) -> None:
    x = torch.randn(2, 3, generator=torch.Generator().manual_seed(1)).mul(3).to(dtype)
    if dtype.is_floating_point:
        x[0, 0], x[0, 1] = float("nan"), -0.0
    back = eval(literal(x), {"torch": torch, "nan": float("nan"), "inf": float("inf")})
    assert back.dtype == x.dtype
    assert back.shape == x.shape
    assert torch.equal(back.double().nan_to_num(7.5), x.double().nan_to_num(7.5))
    assert torch.equal(back.double().signbit() | back.isnan(), x.double().signbit() | x.isnan())
