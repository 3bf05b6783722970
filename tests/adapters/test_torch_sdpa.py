"""What torch's CPU back ends do, as far as their declarations rest on it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from flashcheck.adapters import torch_sdpa_cuda
from flashcheck.adapters.torch_sdpa_cuda import by_autograd
from flashcheck.errors import ArgumentError
from flashcheck.kernel import Kernel
from flashcheck.loading import load
from flashcheck.oracle import fp64
from flashcheck.problem import Problem

KERNELS = ("torch.sdpa.flash", "torch.sdpa.math")
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
TOLERANCE = {"fp16": 1e-2, "bf16": 8e-2, "fp32": 4e-6}
"""Ordinary accuracy: enough to see that the call means what the contract means, no more."""


@pytest.fixture(params=KERNELS)
def kernel(request: pytest.FixtureRequest) -> Kernel:
    return load(request.param)


def _cpu_operator(p: Problem, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    result: tuple[Tensor, ...] = op(q, k, v, 0.0, p.causal is not None, scale=p.effective_scale)
    return result


def test_an_operator_is_differentiated_at_the_forward_that_is_given() -> None:
    """As the adapters of CUDA do it, on the operator that is here."""
    p = problem_with(torch.float32, causal="top_left")
    exact = fp64.forward(p)
    out, lse = exact.out.float() + 0.25, exact.lse.float() - 0.5
    k, v = (x.repeat_interleave(p.group, 1) for x in (p.k, p.v))
    dq, dk, dv = by_autograd(_cpu_operator)(p, k, v, out, lse)
    want = fp64.backward(p, out, lse)
    assert (dq.double() - want.dq).abs().max() < 1e-5
    assert (dk.double().unflatten(1, (2, 2)).sum(2) - want.dk).abs().max() < 1e-5
    assert (dv.double().unflatten(1, (2, 2)).sum(2) - want.dv).abs().max() < 1e-5


def test_cudnn_is_never_asked_for_the_gradients_of_one_row_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """cudnn-frontend#1071; here on the operator of the CPU."""
    rows = []

    def call(p: Problem, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        rows.append(q.shape[:3].numel())
        return _cpu_operator(p, q, k, v)

    monkeypatch.setattr(torch_sdpa_cuda, "_cudnn_call", call)
    g = torch.Generator().manual_seed(0)
    q, dout = (torch.randn(1, 1, 1, 16, generator=g) for _ in range(2))
    k, v = (torch.randn(1, 1, 9, 16, generator=g) for _ in range(2))
    p = Problem(q, k, v, dout=dout)
    exact = fp64.forward(p)
    out, lse = exact.out.float() + 0.25, exact.lse.float() - 0.5
    backward = load("torch.sdpa.cuda.cudnn").backward
    assert backward is not None
    want = fp64.backward(p, out, lse)
    for name, x in backward(p, out, lse).items():
        assert x.shape == getattr(want, name).shape
        assert (x.double() - getattr(want, name)).abs().max() < 1e-5, name
    assert rows == [2]


def problem_with(dtype: torch.dtype = torch.float32, **options: object) -> Problem:
    g = torch.Generator().manual_seed(0)
    q, dout = (torch.randn(2, 4, 37, 16, generator=g).to(dtype) for _ in range(2))
    k, v = (torch.randn(2, 2, 53, 16, generator=g).to(dtype) for _ in range(2))
    return Problem(q, k, v, dout=dout, **options)  # type: ignore[arg-type]


def dense(p: Problem) -> dict[str, Tensor]:
    """Outputs and gradients in float64, from the definition."""
    k, v = (x.double().repeat_interleave(p.group, 1) for x in (p.k, p.v))
    scores = p.q.double() @ k.mT * p.effective_scale
    if p.bias is not None:
        scores = scores + p.bias.double()
    scores = scores.masked_fill(~p.visible(), -torch.inf)
    lse = torch.logsumexp(scores, -1)
    weights = torch.exp(scores - lse[..., None]).nan_to_num(0.0)
    out = weights @ v
    assert p.dout is not None
    dout = p.dout.double()
    ds = weights * (dout @ v.mT - (dout * out).sum(-1, keepdim=True))
    dk, dv = (
        x.unflatten(1, (p.num_kv_heads, p.group)).sum(2)
        for x in (ds.mT @ p.q.double() * p.effective_scale, weights.mT @ dout)
    )
    return {"out": out, "lse": lse, "dq": ds @ k * p.effective_scale, "dk": dk, "dv": dv, "dbias": ds}


def options(name: str) -> dict[str, object]:
    g = torch.Generator().manual_seed(1)
    mask = torch.rand(2, 1, 37, 53, generator=g) > 0.5
    mask[..., 0] = True
    bias = torch.randn(1, 4, 1, 53, generator=g).half().float()
    table: dict[str, dict[str, object]] = {
        "plain": {},
        "causal": {"causal": "top_left"},
        "mask": {"mask": mask},
        "bias": {"bias": bias},
        "mask, bias and causal": {"mask": mask, "bias": bias, "causal": "top_left"},
        "negative scale": {"scale": -0.3},
        "zero scale": {"scale": 0.0},
    }
    return table[name]


CASES = ("plain", "causal", "mask", "bias", "mask, bias and causal", "negative scale", "zero scale")


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("fmt", DTYPES)
def test_means_what_the_contract_means(kernel: Kernel, fmt: str, case: str) -> None:
    p = problem_with(DTYPES[fmt], **options(case))
    assert kernel.capabilities.refuses(p) is None
    want = dense(p)
    result = kernel.forward(p)
    got = {"out": result.out}
    if kernel.capabilities.lse:
        assert result.lse is not None
        got["lse"] = result.lse
    assert kernel.backward is not None
    lse = result.lse if result.lse is not None else want["lse"].float()
    got |= {n: g for n, g in kernel.backward(p, result.out, lse).items() if n != "dbias"}
    for name, value in got.items():
        assert (value.double() - want[name]).abs().max() < TOLERANCE[fmt], name


@pytest.mark.parametrize("lengths", [(17, 0), (0, 17)], ids=["no keys", "no queries"])
def test_math_differentiates_where_nothing_meets(lengths: tuple[int, int]) -> None:
    """Every gradient is 0, that of a bias without elements included."""
    nq, nk = lengths
    q, k = torch.randn(1, 2, nq, 8), torch.randn(1, 2, nk, 8)
    p = Problem(q, k, k, bias=torch.zeros(1, 2, nq, nk), dout=q)
    kernel = load("torch.sdpa.math")
    assert kernel.backward is not None
    got = kernel.backward(p, kernel.forward(p).out, torch.empty(0))
    shapes = {"dq": q.shape, "dk": k.shape, "dv": k.shape, "dbias": (1, 2, nq, nk)}
    assert {name: tuple(x.shape) for name, x in got.items()} == {n: tuple(s) for n, s in shapes.items()}
    assert not any(bool(x.any()) for x in got.values())


def test_math_gives_the_gradient_of_a_broadcast_bias() -> None:
    p = problem_with(bias=options("bias")["bias"])
    kernel = load("torch.sdpa.math")
    assert kernel.backward is not None
    got = kernel.backward(p, kernel.forward(p).out, torch.empty(0))["dbias"]
    torch.testing.assert_close(got.double(), dense(p)["dbias"].sum((0, 2), keepdim=True), atol=1e-5, rtol=0)


def test_flash_lse_of_an_empty_row_is_zero_so_empty_rows_are_not_declared() -> None:
    mask = torch.ones(1, 1, 37, 53, dtype=torch.bool)
    mask[..., 5, :] = False
    kernel = load("torch.sdpa.flash")
    result = kernel.forward(problem_with(mask=mask))
    assert result.lse is not None
    assert (result.out[:, :, 5] == 0).all()
    assert (result.lse[:, :, 5] == 0).all()
    assert not kernel.capabilities.empty_rows


def test_math_handles_empty_rows() -> None:
    kernel = load("torch.sdpa.math")
    mask = torch.ones(1, 1, 37, 53, dtype=torch.bool)
    mask[..., 5, :] = False
    assert (kernel.forward(problem_with(mask=mask)).out[:, :, 5] == 0).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_math_without_keys_sums_q_in_its_own_format_so_zero_length_is_not_declared(
    dtype: torch.dtype,
) -> None:
    kernel = load("torch.sdpa.math")
    k = torch.zeros(1, 2, 0, 64, dtype=dtype)
    q = torch.ones(1, 2, 17, 64, dtype=dtype)
    assert (kernel.forward(Problem(q, k, k)).out == 0).all()
    large = Problem(q * (torch.finfo(dtype).max / 8), k, k)
    assert kernel.forward(large).out.isnan().all()
    assert kernel.capabilities.refuses(large) is not None


def test_flash_refuses_what_would_kill_or_mislead_the_operator() -> None:
    kernel = load("torch.sdpa.flash")
    p = problem_with()
    no_keys = Problem(p.q, p.k[:, :, :0], p.v[:, :, :0])
    strided = Problem(p.q.mT.contiguous().mT, p.k, p.v)
    narrow = Problem(p.q, p.k, p.v[..., :8])
    for bad, name in ((no_keys, "k.shape"), (strided, "q.stride"), (narrow, "v.shape")):
        with pytest.raises(ArgumentError, match=name.replace(".", r"\.")):
            kernel.forward(bad)


@pytest.mark.parametrize("scale", [0.0, -1.0])
def test_flash_causal_with_a_nonpositive_scale_is_nan_and_not_declared(scale: float) -> None:
    kernel = load("torch.sdpa.flash")
    p = problem_with(causal="top_left", scale=scale)
    assert torch.isnan(kernel.forward(p).out[:, :, 0]).all()
    assert kernel.capabilities.refuses(p) == "causal together with nonpositive_scale is not declared"


@pytest.mark.parametrize("fmt", ["fp16", "bf16"])
@pytest.mark.parametrize("num_queries", [32, 100, 200])
def test_flash_backward_rounds_dv_after_every_query_tile(fmt: str, num_queries: int) -> None:
    """The declared query tile and accumulator format predict every bit of dV."""
    dtype = DTYPES[fmt]
    g = torch.Generator().manual_seed(num_queries)
    q, dout = (torch.randn(1, 1, num_queries, 16, generator=g).to(dtype) for _ in range(2))
    k, v = (torch.randn(1, 1, 24, 16, generator=g).to(dtype) for _ in range(2))
    p = Problem(q, k, v, dout=dout)
    kernel = load("torch.sdpa.flash")
    result = kernel.forward(p)
    assert kernel.backward is not None
    assert result.lse is not None
    declared = kernel.arithmetic(p)
    assert declared.grad_accumulator_format is not None
    assert declared.block_queries is not None
    weights = torch.exp(q.double() @ k.double().mT / 4 - result.lse.double()[..., None])
    rounded = weights.float().to(dtype).double()
    total = torch.zeros_like(v)
    for start in range(0, num_queries, declared.block_queries):
        rows = slice(start, start + declared.block_queries)
        total = (total.double() + rounded[..., rows, :].mT @ dout[..., rows, :].double()).to(dtype)
    wrong = (kernel.backward(p, result.out, result.lse)["dv"] != total).float().mean()
    assert wrong < 0.02  # fp32 sums differ from float64 ones in a few ties
