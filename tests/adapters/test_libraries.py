"""Adapters of libraries that need a GPU, on stand-ins with the libraries' signatures: layouts, names, LSE.

A stand-in computes by the formula, so its certificate is clean exactly where the adapter hands over what the
contract means and reads back what the library returns.
"""

# ruff: noqa: ARG001 - the signatures are the libraries'
from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from rich.console import Console
from torch import Tensor

from flashcheck.adapters import BUILT_IN, triton_tutorial
from flashcheck.certify import certify
from flashcheck.errors import UnusableError
from flashcheck.kernel import Kernel
from flashcheck.listing import run_list
from flashcheck.loading import load
from flashcheck.plan import make_plan
from flashcheck.problem import Problem
from tests.adapters import formula, stand_ins
from tests.adapters.test_torch_sdpa import problem_with

PACKED = "torch.varlen"


@pytest.fixture
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Kernel]:
    """The kernel of the parameter's name, with its library's stand-in."""
    name = request.param
    if name != PACKED:
        for module, stand_in in stand_ins.MODULES[name].items():
            monkeypatch.setitem(sys.modules, module, stand_in)
        yield load(name)
        return
    with torch.library._scoped_library("aten", "IMPL") as lib:  # torch's own code above the operator
        lib.impl("_flash_attention_forward", _packed_forward, "CPU")
        lib.impl("_flash_attention_backward", _packed_backward, "CPU")
        yield load(name)


def _segments(ends_q: Tensor, ends_k: Tensor) -> Iterator[tuple[slice, slice]]:
    assert ends_q.dtype == ends_k.dtype == torch.int32
    rows, keys = ([slice(*pair) for pair in pairwise(ends.tolist())] for ends in (ends_q, ends_k))
    yield from zip(rows, keys, strict=True)


def _packed_options(q: Tensor, causal: bool, scale: float | None, left: int | None, right: int | None):  # type: ignore[no-untyped-def]
    sides = (None if side is None or side < 0 else side for side in (left, right))
    return formula.Options(q.shape[-1] ** -0.5 if scale is None else scale, causal, *sides)


def _packed_forward(  # type: ignore[no-untyped-def]
    query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, return_debug_mask, *,
    scale=None, window_size_left=None, window_size_right=None, seqused_k=None, alibi_slopes=None, **more
):  # fmt: skip
    assert not any(x is not None for x in more.values())
    options = _packed_options(query, is_causal, scale, window_size_left, window_size_right)
    out = torch.zeros_like(query)
    lse = query.new_zeros((query.shape[1], query.shape[0]), dtype=torch.float32)
    for rows, keys in _segments(cum_seq_q, cum_seq_k):
        parts = (x.transpose(0, 1).unsqueeze(0) for x in (query[rows], key[keys], value[keys]))
        o, own = formula.forward(*parts, options)
        out[rows], lse[:, rows] = o[0].transpose(0, 1), own[0]
    return out, lse, torch.zeros(2, dtype=torch.uint64), torch.zeros(0), torch.zeros(0)


def _packed_backward(  # type: ignore[no-untyped-def]
    grad_out, query, key, value, out, logsumexp, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal,
    rng_state, unused, *, scale=None, window_size_left=None, window_size_right=None
):  # fmt: skip
    options = _packed_options(query, is_causal, scale, window_size_left, window_size_right)
    dq, dk, dv = torch.zeros_like(query), torch.zeros_like(key), torch.zeros_like(value)
    for rows, keys in _segments(cum_seq_q, cum_seq_k):
        parts = (
            x.transpose(0, 1).unsqueeze(0)
            for x in (query[rows], key[keys], value[keys], out[rows], grad_out[rows])
        )
        q, k, v, o, do = parts
        found = formula.backward(q, k, v, o, logsumexp[:, rows].unsqueeze(0), do, options)
        dq[rows], dk[keys], dv[keys] = (x[0].transpose(0, 1) for x in found[:3])
    return dq, dk, dv


everywhere = pytest.mark.parametrize("library", [*stand_ins.MODULES, PACKED], indirect=True)


@everywhere
def test_a_library_that_computes_the_formula_passes(library: Kernel) -> None:
    here = replace(library.capabilities, devices=("cpu",), dtypes=("bf16",))
    kernel = replace(library, capabilities=here)
    outcome = certify(kernel, make_plan(kernel, max_cases=14))
    assert outcome.judged == 14
    assert not outcome.findings, [f.record for f in outcome.findings]
    assert not outcome.judge_faults


GIVEN = ["flash_attn.2", "flash_attn.3", "flash_attn.4", "xformers.flash", PACKED]


@pytest.mark.parametrize(
    ("library", "dim"), [*((n, 16) for n in GIVEN), ("flash_attn.2", 20)], indirect=["library"]
)
def test_gradients_are_of_the_forward_that_is_given(library: Kernel, dim: int) -> None:
    """Not of the library's own: another LSE and O must change them as the formula says."""
    g = torch.Generator().manual_seed(3)
    q, dout, out = (torch.randn(2, 4, 9, dim, generator=g).bfloat16() for _ in range(3))
    k, v = (torch.randn(2, 2, 13, dim, generator=g).bfloat16() for _ in range(2))
    lse = torch.full((2, 4, 9), 4.0)
    p = Problem(q, k, v, dout=dout, causal="bottom_right")
    assert library.backward is not None
    got = library.backward(p, out, lse)
    options = formula.Options(dim**-0.5, causal=True)
    want = dict(zip(("dq", "dk", "dv"), formula.backward(q, k, v, out, lse, dout, options), strict=False))
    for name, x in want.items():
        torch.testing.assert_close(got[name], x, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("library", ["flash_attn.2"], indirect=True)
def test_a_backward_that_reads_no_stored_forward_is_refused(
    library: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its gradients would be judged on a forward that it never saw."""

    def eager(q, k, v, softmax_scale=None, causal=False, return_attn_probs=False, **_):  # type: ignore[no-untyped-def]
        s = softmax_scale * q.transpose(1, 2) @ k.transpose(1, 2).mT
        return (s.softmax(-1) @ v.transpose(1, 2)).transpose(1, 2), s.logsumexp(-1), None

    monkeypatch.setattr(sys.modules["flash_attn"], "flash_attn_func", eager)
    kernel = load("flash_attn.2")
    p = problem_with(torch.float32)
    p = Problem(p.q[:, :2], p.k, p.v, dout=p.dout[:, :2])  # type: ignore[index]
    assert kernel.backward is not None
    with pytest.raises(RuntimeError, match="reads no stored"):
        kernel.backward(p, torch.zeros_like(p.dout), torch.zeros(p.dout.shape[:3]))  # type: ignore[arg-type, union-attr]


@pytest.mark.parametrize("library", ["flashinfer.single_prefill"], indirect=True)
def test_a_log_sum_exp_in_base_two_is_converted(library: Kernel) -> None:
    p = problem_with(torch.float16, causal="bottom_right")
    lse = library.forward(p).lse
    want = formula.forward(p.q, p.k, p.v, formula.Options(p.effective_scale, causal=True))[1]
    torch.testing.assert_close(lse, want, atol=1e-6, rtol=1e-6)


NOT_HERE = {
    "flash_attn.2": ("flash_attn", "pip install flash-attn"),
    "flash_attn.3": ("flash_attn_interface", "python setup.py install in flash-attention's folder hopper"),
    "flash_attn.4": ("flash_attn.cute", "pip install flash-attn-4"),
    "xformers.flash": ("xformers.ops", "pip install xformers"),
    "flashinfer.single_prefill": ("flashinfer", "pip install flashinfer-python"),
}


@pytest.mark.parametrize("name", NOT_HERE)
def test_a_missing_library_is_one_line_that_says_how_to_get_it(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, install = NOT_HERE[name]
    for part in (module, module.partition(".")[0]):
        monkeypatch.setitem(sys.modules, part, None)
    with pytest.raises(UnusableError) as error:
        load(name)
    assert error.value.reason.endswith(f"({install})") or "fails" in error.value.reason
    assert str(error.value).startswith(f"KERNEL = {name}: ")
    assert "\n" not in str(error.value)


TUTORIAL = """
import torch
from tests.adapters import formula


class _attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, causal, sm_scale, warp_specialize=True):
        assert not warp_specialize
        assert q.shape[-1] == k.shape[-1] == v.shape[-1]
        assert q.shape[-1] in {16, 32, 64, 128, 256}
        assert q.shape[2] % 128 == 0
        assert q.shape == k.shape
        assert q.dtype == torch.float16
        return formula.forward(q, k, v, formula.Options(sm_scale, causal))[0]


attention = _attention.apply
"""


def test_the_triton_tutorial_is_judged_on_whole_tiles(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The stand-in asserts what the tutorial does, and what it reads without a mask: multiples of 128."""
    file = tmp_path / "06-fused-attention.py"
    file.write_text(TUTORIAL)
    monkeypatch.setenv(triton_tutorial.VARIABLE, str(file))
    tutorial = load("triton.tutorial")
    assert re.search(rf"{file.name}, SHA-256 [0-9a-f]{{16}}$", tutorial.source)  # no path of this machine
    kernel = replace(tutorial, capabilities=replace(tutorial.capabilities, devices=("cpu",)))
    plan = make_plan(kernel, max_cases=5)
    assert {case.spec.num_keys % 128 for case in plan.cases} == {0}
    outcome = certify(kernel, plan)
    assert outcome.judged == 5
    assert not outcome.findings, [f.record for f in outcome.findings]
    assert not make_plan(kernel, "standard").unplanned


def test_the_triton_tutorial_says_why_it_is_not_here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    said = {}
    monkeypatch.delenv(triton_tutorial.VARIABLE, raising=False)
    for name, text in (("unset", None), ("absent", None), ("broken", "1 / 0\n"), ("empty", "")):
        file = tmp_path / f"{name}.py"
        if text is not None:
            file.write_text(text)
        if name != "unset":
            monkeypatch.setenv(triton_tutorial.VARIABLE, str(file))
        with pytest.raises(UnusableError) as error:
            load("triton.tutorial")
        said[name] = error.value.reason.replace(f"{tmp_path}/", "")
    assert said == {
        "unset": "set FLASHCHECK_TRITON_TUTORIAL to the path of Triton's 06-fused-attention.py",
        "absent": "FLASHCHECK_TRITON_TUTORIAL is absent.py, where there is no file",
        "broken": "importing broken.py fails: ZeroDivisionError: division by zero",
        "empty": "empty.py has no attention",
    }


def test_a_library_that_breaks_or_lacks_the_function_is_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("libraries")
    (folder / "flash_attn.py").write_text("raise RuntimeError('no kernel image\\nfor this device')\n")
    (folder / "flashinfer.py").write_text("")
    monkeypatch.syspath_prepend(str(folder))
    for module in ("flash_attn", "flashinfer"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    with pytest.raises(UnusableError, match=r"importing flash_attn fails: RuntimeError: no kernel image$"):
        load("flash_attn.2")
    with pytest.raises(UnusableError, match=r"flashinfer has no single_prefill_with_kv_cache"):
        load("flashinfer.single_prefill")


def test_the_list_shows_every_kernel_within_100_columns_and_why_it_is_not_here() -> None:
    console = Console(width=100, record=True, no_color=True, file=None, quiet=False)
    with console.capture() as capture:
        run_list("kernels", console)
    lines = capture.get().splitlines()
    assert max(map(len, lines)) <= 100
    first = {line.split()[0] for line in lines if line and not line.startswith(" ")}
    assert set(BUILT_IN) <= first
    assert not any("…" in line for line in lines)
    if not torch.cuda.is_available():
        assert re.search(r"torch\.sdpa\.cuda\.flash +not here: needs cuda;", capture.get())
    assert re.search(r"flash_attn\.4 +not here: \S", capture.get()) or torch.cuda.is_available()
