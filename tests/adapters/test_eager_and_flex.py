"""Adapters that run here: they mean what the contract means, and short plans find nothing wrong with them."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch
import torch.nn.attention.flex_attention as flex_attention_module

from flashcheck.adapters.flash_attn_like import follows_flash_attn
from flashcheck.adapters.torch_flex_backward import by_autograd
from flashcheck.bounds.forward import forward_bound
from flashcheck.certify import certify
from flashcheck.checks import Judged
from flashcheck.formats import FP32, format_of
from flashcheck.kernel import as_kernel
from flashcheck.loading import load
from flashcheck.oracle import fp64
from flashcheck.plan import make_plan
from flashcheck.problem import Problem
from tests.adapters.test_torch_sdpa import dense, problem_with

HERE = ["eager", "torch.flex.eager"]
FLEX_ONLY = {
    "window": {"causal": "bottom_right", "window": (9, None)},
    "softcap": {"softcap": 3.0},
    "alibi": {"alibi_slopes": torch.tensor([0.5, 0.25, 0.125, 0.0625])},
    "padding": {"key_lengths": torch.tensor([53, 20])},
}


@pytest.mark.parametrize("name", HERE)
def test_no_false_alarm_on_a_short_plan(name: str) -> None:
    kernel = load(name)
    outcome = certify(kernel, make_plan(kernel, max_cases=6))
    assert outcome.judged == 18
    assert not outcome.findings
    assert not outcome.judge_faults


@pytest.mark.parametrize("case", FLEX_ONLY)
def test_flex_options_mean_what_the_contract_means(case: str) -> None:
    p = problem_with(torch.float32, **FLEX_ONLY[case])
    result = load("torch.flex.eager").forward(p)
    exact = fp64.forward(p)
    assert (result.out.double() - exact.out).abs().max() < 4e-6
    assert result.lse is not None
    assert (result.lse.double() - exact.lse).abs().max() < 4e-6


def test_a_product_past_fp16_may_give_nan_in_eager_attention_but_no_finite_wrong_number() -> None:
    """Also at scale 0, where the exact scores are all 0 and inf * 0 is NaN."""
    q = torch.full((1, 1, 2, 64), 100.0, dtype=torch.float16)
    for scale in (1.0, 0.0):
        p = Problem(q, q, q, scale=scale)
        kernel = load("eager")
        bound = forward_bound(p, fp64.forward(p), kernel.arithmetic(p), kernel.machine(torch.device("cpu")))
        got = kernel.forward(p).out.double()
        assert got.isnan().all()
        assert (bound.out.interval.margin(got) <= 1).all()


@pytest.mark.parametrize(
    ("dtype", "size", "scale"),
    [(torch.float16, 2.0**7, 1.0), (torch.float16, 2.0**6, 4.0), (torch.bfloat16, 2.0**63, 1.0)],
    ids=["product", "scaled product", "sum in fp32"],
)
def test_a_hidden_score_that_overflows_may_make_its_row_nan_where_the_mask_is_added(
    dtype: torch.dtype, size: float, scale: float
) -> None:
    q, k, v = (torch.zeros(1, 1, 2, 8, dtype=dtype) for _ in range(3))
    q[..., 0, :4], k[..., 1, :4] = size, size  # 4 size^2 scale: the least power of two to overflow
    v[..., 0, :], v[..., 1, :] = 1.0, -2.0
    p = Problem(q, k, v, scale=scale, causal="top_left")
    kernel = load("eager")
    judged = Judged(kernel, p)
    got = judged.result.out.double()
    assert got[..., 0, :].isnan().all()
    assert got[..., 1, :].isfinite().all()
    assert not any(m.over for m in (*judged.measured.values(), *judged.measured_gradients.values()))
    margin = judged.bound.out.interval.margin
    assert (margin(torch.full_like(got, 0.5))[..., 0, :] > 1).all()
    assert (margin(torch.full_like(got, torch.nan))[..., 1, :] > 1).all()
    just_below = replace(kernel, forward=lambda _: judged.result)
    smaller = p.replaced(q=torch.where(q == 0, q, q * 0.5))
    assert (Judged(just_below, smaller).bound.out.interval.margin(got)[..., 0, :] > 1).all()
    sets_them = replace(kernel, arithmetic=lambda x: replace(kernel.arithmetic(x), normalise="after_product"))
    assert (Judged(sets_them, p).bound.out.interval.margin(got)[..., 0, :] > 1).all()


@pytest.mark.parametrize("options", [{}, {"causal": "top_left"}, {"scale": -0.3}, {"scale": 0.0}], ids=str)
def test_eager_gradients_mean_what_the_contract_means(options: dict[str, object]) -> None:
    p = problem_with(torch.float32, **options)
    kernel = load("eager")
    assert kernel.backward is not None
    want = dense(p)
    for name, x in kernel.backward(p, torch.empty(0), torch.empty(0)).items():
        assert (x.double() - want[name]).abs().max() < 4e-6, name


def _given(**options: object) -> tuple[Problem, torch.Tensor, torch.Tensor]:
    """A problem in fp32 and a stored O and LSE that are not its own."""
    p = problem_with(torch.float32, **options)
    exact = fp64.forward(p)
    return p, exact.out.float() + 0.25, exact.lse.float() - 0.5


def _differs(p: Problem, out: torch.Tensor, lse: torch.Tensor, got: Mapping[str, torch.Tensor]) -> float:
    exact = fp64.backward(p, out, lse)
    return max(float((x.double() - getattr(exact, name)).abs().max()) for name, x in got.items())


@pytest.mark.parametrize("case", [*FLEX_ONLY, "scale 0", "bias"])
def test_flex_gradients_are_of_the_forward_that_is_given(case: str) -> None:
    more = {"scale 0": {"scale": 0.0}, "bias": {"bias": torch.linspace(-1, 1, 53).view(1, 1, 1, 53)}}
    p, out, lse = _given(**(FLEX_ONLY | more)[case])
    backward = load("torch.flex.eager").backward
    assert backward is not None
    assert _differs(p, out, lse, backward(p, out, lse)) < 1e-5


def test_compiled_flex_is_given_its_forward_through_autograd(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU with the back end that runs what torch.compile has traced, where torch refuses gradients."""
    monkeypatch.setattr(flex_attention_module, "_validate_device", lambda *_: None)
    compiled = torch.compile(flex_attention_module.flex_attention, backend="aot_eager", dynamic=False)
    p, out, lse = _given(causal="bottom_right", softcap=3.0)
    assert _differs(p, out, lse, by_autograd(compiled, p, out, lse)) < 1e-5


@pytest.mark.parametrize("widened", [False, True])
def test_flex_rounds_ds_as_it_declares(widened: bool) -> None:
    """A declaration without its rounding of dS, or of that of a widened score, is refuted."""
    kernel = load("torch.flex.eager")
    g = torch.Generator().manual_seed(5)
    k, v, dout = (2 * torch.randn(1, 2, 64, 16, generator=g) for _ in range(3))
    k, v, dout = (x.bfloat16() for x in (k, v, dout))
    bias = torch.zeros(1, 1, 1, 64) if widened else None
    p = Problem(torch.zeros_like(k), k, v, dout=dout, scale=0.3, bias=bias)
    right = kernel.arithmetic(p)
    wrong = {"grad_score_format": FP32} if widened else {"scaled_grad_score_format": None}
    margins = []
    for declared in (right, replace(right, **wrong)):
        dq = Judged(replace(kernel, arithmetic=lambda _, a=declared: a), p).measured_gradients["dQ"]  # type: ignore[misc]
        assert dq.bound.centred is not None
        margins.append(float(dq.bound.centred.margin(dq.got).max()))
    assert margins[0] <= 1 < margins[1]


@pytest.mark.parametrize(
    ("forgotten", "integers"), [("grad_probability_format", False), ("scaled_grad_score_format", True)]
)
def test_eager_rounds_dp_and_the_scaled_ds(forgotten: str, integers: bool) -> None:
    """A declaration without one of the two roundings is refuted by the library's own gradients.

    Queries of 0 make every score and every P exact, and small integers dP: one rounding is left to tell.
    """
    kernel = load("eager")
    g = torch.Generator().manual_seed(5)
    k, v, dout = (2 * torch.randn(1, 2, 64, 16, generator=g) for _ in range(3))
    if integers:
        v, dout = v.round(), dout.round()
    k, v, dout = (x.bfloat16() for x in (k, v, dout))
    p = Problem(torch.zeros_like(k), k, v, dout=dout, scale=0.3)
    right = kernel.arithmetic(p)
    if integers:  # then dP is not rounded, and need not be declared so
        right = replace(right, grad_probability_format=None)
    margins = []
    for declared in (right, replace(right, **{forgotten: None})):  # type: ignore[arg-type]
        judged = Judged(replace(kernel, arithmetic=lambda _, a=declared: a), p)  # type: ignore[misc]
        dq = judged.measured_gradients["dQ"]
        assert dq.bound.centred is not None
        margins.append(float(dq.bound.centred.margin(dq.got).max()))
    assert margins[0] <= 1 < margins[1]


@pytest.mark.skipif(importlib.util.find_spec("jax") is None, reason="needs jax, an extra")
@pytest.mark.parametrize("name", ["jax.dot_product_attention", "jax.pallas.mha"])
def test_jax_means_what_the_contract_means(name: str) -> None:
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, 32, 16, generator=g).bfloat16() for _ in range(3))
    p = Problem(q, k, v, causal="top_left", dout=v)
    kernel = load(name)
    assert (kernel.forward(p).out.double() - dense(p)["out"]).abs().max() < 2e-2
    assert kernel.backward is not None
    # Of the forward that is given, where one is read: not the kernel's own.
    exact = fp64.forward(p)
    out, lse = exact.out.bfloat16() + 0.25, exact.lse.float() - 0.5
    want = fp64.backward(p) if kernel.arithmetic(p).keeps_probabilities else fp64.backward(p, out, lse)
    for gradient, x in kernel.backward(p, out, lse).items():
        size = getattr(want, gradient)
        assert (x.double() - size).abs().max() < 2e-2 * size.abs().max(), gradient


@pytest.mark.skipif(importlib.util.find_spec("jax") is None, reason="needs jax, an extra")
def test_pallas_takes_delta_in_the_inputs_format() -> None:
    """A declaration with a delta in fp32 is refuted: golden/findings/013."""
    kernel = load("jax.pallas.mha")
    g = torch.Generator().manual_seed(0)
    q, k, v, dout = (torch.randn(1, 2, 32, 32, generator=g).bfloat16() for _ in range(4))
    p = Problem(q, k, v, dout=dout)
    right = kernel.arithmetic(p)
    margins = []
    for declared in (right, replace(right, delta_format=None)):
        judged = Judged(replace(kernel, arithmetic=lambda _, a=declared: a), p)  # type: ignore[misc]
        margins.append(float(judged.measured_gradients["dQ"].worst.margin))
    assert margins[0] <= 1 < margins[1]


@pytest.mark.skipif(importlib.util.find_spec("jax") is None, reason="needs jax, an extra")
def test_pallas_with_scores_of_1e11_is_inside_its_bound() -> None:
    """XLA contracts the scaled product with the subtraction of the maximum: NaN, or the right number."""
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 1, 32, 16, generator=g) for _ in range(3))
    p = Problem(1e6 * q, 1e5 * k, v)
    assert Judged(load("jax.pallas.mha"), p).measured["O"].over == 0


@pytest.mark.skipif(importlib.util.find_spec("jax") is None, reason="needs jax, an extra")
@pytest.mark.parametrize(
    ("name", "wrong"), [("jax.dot_product_attention", torch.bfloat16), ("jax.pallas.mha", torch.float32)]
)
def test_jax_rounds_the_scaled_ds_or_not_as_declared(name: str, wrong: torch.dtype) -> None:
    """Queries of 0 and values that are multiples of the number of keys make everything before exact."""
    g = torch.Generator().manual_seed(5)
    k = (2 * torch.randn(1, 2, 16, 16, generator=g)).bfloat16()
    v = 16 * torch.randint(-4, 5, (1, 2, 16, 16), generator=g).bfloat16()
    dout = torch.randint(-1, 2, (1, 2, 16, 16), generator=g).bfloat16()
    p = Problem(torch.zeros_like(k), k, v, dout=dout, scale=0.3)
    kernel = load(name)
    right = replace(kernel.arithmetic(p), delta_format=None, grad_probability_format=None)
    margins = []
    for declared in (right, replace(right, scaled_grad_score_format=format_of(wrong))):
        judged = Judged(replace(kernel, arithmetic=lambda _, a=declared: a), p)  # type: ignore[misc]
        dq = judged.measured_gradients["dQ"]
        assert dq.bound.centred is not None
        margins.append(float(dq.bound.centred.margin(dq.got).max()))
    assert margins[0] <= 1 < margins[1]


def flash_attn_func(q, k, v, softmax_scale=None, causal=False, window_size=(-1, -1), return_attn_probs=False):  # type: ignore[no-untyped-def]
    """A stand-in with flash-attn's convention."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    left, right = (None if side < 0 else side for side in window_size)
    window = None if left is None and right is None else (left, right)
    p = Problem(q, k, v, scale=softmax_scale, causal="bottom_right" if causal else None, window=window)
    exact = fp64.forward(p)
    out = exact.out.to(q.dtype).transpose(1, 2)
    return (out, exact.lse.float(), None) if return_attn_probs else out


def test_a_callable_of_flash_attn_s_convention_is_recognised_and_judged() -> None:
    kernel = as_kernel(flash_attn_func, "mine.py:flash_attn_func")
    assert kernel.capabilities.options == ("scale", "causal", "window")
    assert kernel.capabilities.lse
    p = problem_with(torch.bfloat16, causal="bottom_right")
    result = kernel.forward(p)
    assert result.lse is not None
    assert (result.lse.double() - fp64.forward(p).lse).abs().max() < 1e-5
    assert not follows_flash_attn({"q": 0, "is_causal": 0, "scale": 0})
