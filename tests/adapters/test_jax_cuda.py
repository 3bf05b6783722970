"""JAX's attentions on CUDA, as far as a CPU shows them: tensors between the libraries, what is declared, and
calls that agree with the functions of the JAX that is installed."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import pytest
import torch

from flashcheck.oracle import fp64
from flashcheck.problem import Problem

jax = pytest.importorskip("jax")

from flashcheck.adapters import jax_attention, jax_cuda, jax_tensors  # noqa: E402
from flashcheck.errors import UnusableError  # noqa: E402
from flashcheck.loading import load  # noqa: E402
from tests.adapters.test_torch_sdpa import problem_with  # noqa: E402

NAMES = ("jax.cuda.xla", "jax.cuda.cudnn", "jax.cuda.pallas")
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.bool)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tensors_come_back_as_they_were_from_any_strides(dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(0)
    whole = torch.randn(3, 4, 5, 9, generator=g).to(dtype)
    for x in (
        whole,
        whole.transpose(1, 2),
        whole[..., 1:8],
        whole[:1].transpose(0, 1),
        whole[0, 0, 0].expand(2, 9),
    ):
        there = jax_tensors.to_jax(x)
        assert there.shape == tuple(x.shape)
        back = jax_tensors.to_torch(there)
        assert back.dtype == dtype
        assert torch.equal(back, x)


def test_neither_side_can_change_the_other_s_numbers() -> None:
    for x in (torch.zeros(64), torch.zeros(8, 8).t(), torch.zeros(1, 64).t()):
        there = jax_tensors.to_jax(x)
        x += 1.0
        back = jax_tensors.to_torch(there)
        assert not back.any()
        back += 2.0
        assert not jax_tensors.to_torch(there).any()


@pytest.mark.parametrize(("set_by_user", "expected"), [(None, "false"), ("true", "true")])
def test_jax_is_told_not_to_take_the_gpu_s_memory_unless_the_user_says_so(
    set_by_user: str | None, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(jax_tensors.PREALLOCATE, raising=False)
    if set_by_user is not None:
        monkeypatch.setenv(jax_tensors.PREALLOCATE, set_by_user)
    jax_tensors.import_jax()
    assert os.environ[jax_tensors.PREALLOCATE] == expected


def _problem(dtype: torch.dtype = torch.bfloat16, length: int = 32, dim: int = 16, **more: Any) -> Problem:
    x = torch.zeros(1, 2, length, dim, dtype=dtype)
    return Problem(x, x, x, **more)


@pytest.mark.parametrize(
    ("name", "problem", "refused"),
    [
        ("xla", _problem(torch.float32, 7, 5, scale=-1.0), None),
        ("xla", _problem(mask=torch.ones(1, 1, 32, 32, dtype=torch.bool)), None),
        ("xla", _problem(causal="bottom_right"), "causal=bottom_right is not declared"),
        ("cudnn", _problem(torch.float32), "dtype fp32 is not declared"),
        ("cudnn", _problem(torch.float16, 7, 8, causal="top_left"), None),
        ("cudnn", _problem(dim=256), None),
        ("cudnn", _problem(dim=12), "head dim 12 is not declared"),
        ("cudnn", _problem(length=1), "Nk = 1 is not declared"),
        ("cudnn", _problem(scale=0.0), "a scale of zero or less is not declared"),
        ("cudnn", _problem(mask=torch.ones(1, 1, 32, 32, dtype=torch.bool)), "option mask is not declared"),
        ("pallas", _problem(length=48, dim=96, causal="top_left"), None),
        ("pallas", _problem(length=40), "a length of 40 is not declared"),
        ("pallas", _problem(torch.float32), "dtype fp32 is not declared"),
    ],
)  # fmt: skip
def test_what_is_declared(name: str, problem: Problem, refused: str | None) -> None:
    capabilities = load(f"jax.cuda.{name}").capabilities
    assert capabilities.devices == ("cuda",)
    assert capabilities.refuses(problem) == refused


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_gpu_rounds_the_scaled_ds_for_products_of_16_bits(dtype: torch.dtype) -> None:
    """As the program handed to XLA says, by a conversion or by the product's algorithm."""
    inputs = [jax_tensors.to_jax(torch.zeros(1, 8, 2, 16, dtype=dtype)) for _ in range(4)]
    run = jax_cuda._compiled(jax_attention.differentiate, causal=False)
    program = run.trace(*inputs, None, 0.3).lower(lowering_platforms=("cuda",)).as_text()
    short = {torch.float16: "f16", torch.bfloat16: "bf16"}[dtype]
    products = [line for line in program.splitlines() if "dot_general" in line]
    of_ds = [line for line in products if line.rstrip().endswith("xf32>")]
    assert len(products) == 5
    assert len(of_ds) == 3  # Q K^T is the third
    for line in of_ds:
        assert f"lhs_precision_type = {short}, rhs_precision_type = {short}" in line
    p = _problem(dtype)
    assert load("jax.cuda.xla").arithmetic(p).grad_operand_format == p.format


def test_programs_of_old_shapes_are_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A long campaign would fill the memory with them."""
    cleared: list[int] = []
    monkeypatch.setattr(jax, "clear_caches", lambda: cleared.append(1))
    monkeypatch.setattr(jax_tensors, "_shapes", set())
    for length in [*range(1, jax_tensors._KEPT + 1), 1, 2, 3]:
        jax_tensors.to_jax(torch.zeros(length))
    assert not cleared
    for length in range(1, jax_tensors._KEPT + 1):
        jax_tensors.to_jax(torch.zeros(length, 1))
    assert len(cleared) == 1


def test_xla_s_compiled_functions_mean_what_the_contract_means() -> None:
    for options in ({"causal": "top_left"}, {"scale": -0.3}, {"mask": torch.rand(2, 1, 37, 53) < 0.9}):
        p = problem_with(torch.float32, **options)
        kernel = load("jax.cuda.xla")
        assert (kernel.forward(p).out.double() - fp64.forward(p).out).abs().max() < 1e-5
        assert kernel.backward is not None
        exact = fp64.backward(p)
        for name, x in kernel.backward(p, torch.empty(0), torch.empty(0)).items():
            assert (x.double() - getattr(exact, name)).abs().max() < 1e-5, name


def test_a_function_is_compiled_once_for_a_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    traced, attend = [], jax_attention.attend

    def maker(*, causal: bool) -> Any:
        def attention(*inputs: Any) -> Any:
            traced.append(causal)  # runs when a program is made, not when it is called
            return attend(causal=causal)(*inputs)

        return attention

    monkeypatch.setattr(jax_attention, "attend", maker)
    for scale in (0.5, 0.25):
        load("jax.cuda.xla").forward(_problem(scale=scale))
    load("jax.cuda.xla").forward(_problem(length=16))
    assert len(traced) == 2


@pytest.mark.parametrize("length", [16, 48, 64])
def test_the_backward_s_smaller_tiles_mean_the_same(length: int) -> None:
    """The tiles of ``jax.cuda.pallas``, here in Pallas' interpreter."""
    g = torch.Generator().manual_seed(0)
    q, k, v, dout = (torch.randn(1, 2, length, 16, generator=g) for _ in range(4))
    p = Problem(q, k, v, causal="top_left", dout=dout)
    exact = fp64.forward(p)
    out, lse = exact.out.float() + 0.25, exact.lse.float() - 0.5
    kernel = load("jax.cuda.pallas")
    assert isinstance(kernel.forward.__self__, jax_attention.Pallas)  # type: ignore[attr-defined]
    interpreted = replace(kernel.forward.__self__, interpret=True)  # type: ignore[attr-defined]
    want = fp64.backward(p, out, lse)
    for name, x in interpreted.backward(p, out, lse).items():
        assert (x.double() - getattr(want, name)).abs().max() < 1e-4, name
    assert interpreted.backward_tile(length) <= 32


def test_cudnn_s_functions_take_what_they_are_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shapes by JAX's own rules, operands in the order of its lowering for CUDA."""
    cudnn = jax_cuda._Cudnn()
    module = __import__(jax_cuda._CUDNN, fromlist=["check_cudnn_version"])
    monkeypatch.setattr(module, "check_cudnn_version", lambda: 91900)
    q, k = (jax.ShapeDtypeStruct((2, length, heads, 64), "bfloat16") for length, heads in ((32, 4), (48, 2)))
    lse = jax.ShapeDtypeStruct((2, 4, 32), "float32")
    for causal in (False, True):
        forward, backward = (make(0.3, causal=causal) for make in (cudnn._forward, cudnn._backward))
        assert jax.eval_shape(forward, q, k, k) == (q, lse)
        assert tuple(jax.eval_shape(backward, q, k, k, q, lse, q)) == (q, k, k)
        programs = (forward.trace(q, k, k), backward.trace(q, k, k, q, lse, q))
        there, back = (x.lower(lowering_platforms=("cuda",)).as_text() for x in programs)
        assert "@__cudnn$fmhaSoftmax(%arg0, %arg1, %arg2)" in there
        # q, k, v, LSE, dO, O
        assert "@__cudnn$fmhaSoftmaxBackward(%arg0, %arg1, %arg2, %arg4, %arg5, %arg3)" in back
        for program in (there, back):
            assert ("mask_type\\22: \\22CAUSAL" in program) == causal
            assert "fmha_scale\\22: 0.3" in program


def test_cudnn_is_never_asked_for_the_gradients_of_one_row_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """cudnn-frontend#1071; here by a rule that returns what it was given."""
    rows = []

    def rule(q: Any, k: Any, v: Any, out: Any, lse: Any, dout: Any) -> tuple[Any, ...]:
        assert q.shape == out.shape == dout.shape
        rows.append(lse.size)
        return dout, k, v

    monkeypatch.setattr(jax_cuda._Cudnn, "_backward", lambda _self, _scale, **_: rule)
    for batch, heads, length in ((1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2)):
        q, dout = (torch.randn(batch, heads, length, 16) for _ in range(2))
        k, v = (torch.randn(batch, heads, 9, 16) for _ in range(2))
        p = Problem(q, k, v, dout=dout)
        found = jax_cuda._Cudnn().backward(p, q, torch.zeros(batch, heads, length))
        assert rows.pop() == max(2, batch * heads * length)
        for name, x in {"dq": dout, "dk": k, "dv": v}.items():
            assert torch.equal(found[name], x), name


@pytest.mark.parametrize("name", NAMES)
def test_a_jax_without_cuda_is_one_line(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if any(d.platform == "gpu" for d in jax.devices()):
        pytest.skip("this jax has CUDA")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(UnusableError, match=r"jax finds no CUDA device: .*\(pip install 'jax\[cuda13\]'\)$"):
        load(name)
