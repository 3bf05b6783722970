"""Products that are rounded where a declaration says that they are not (golden/findings/023, 024), and what
the adapters ask of torch."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from flashcheck.adapters import eager, torch_flex
from flashcheck.adapters.jax_cuda import XLA_CAPABILITIES, xla_arithmetic
from flashcheck.adapters.torch_products import FLAGS, sums_in_fp32
from flashcheck.arithmetic import HOPPER
from flashcheck.checks import CHECKS, Judged
from flashcheck.checks.record import Status
from flashcheck.inputs.spec import ProblemSpec
from flashcheck.kernel import ForwardResult, Kernel
from flashcheck.problem import Problem

MATMUL: Any = torch.backends.cuda.matmul


@pytest.fixture
def flags() -> Iterator[dict[str, bool]]:
    """The defaults, which a test may change."""
    before = {name: getattr(MATMUL, name) for name in FLAGS}
    yield before
    for name, value in before.items():
        setattr(MATMUL, name, value)


def _weights(p: Problem) -> Tensor:
    scores = (p.q.float() @ p.k.float().mT).to(p.q.dtype)
    scores = (scores.float() * p.effective_scale).to(p.q.dtype).float()
    assert p.mask is not None
    return scores.masked_fill(~p.mask, -torch.inf).softmax(-1).to(p.q.dtype)


def _in_parts(cut: int) -> Kernel:
    """Finding 023: the eager attention with P V in two parts, each rounded into the input format."""

    def forward(p: Problem) -> ForwardResult:
        weights = _weights(p)
        parts = [weights[..., a].float() @ p.v[..., a, :].float() for a in (slice(cut), slice(cut, None))]
        return ForwardResult(sum(x.to(p.q.dtype).float() for x in parts).to(p.q.dtype))  # type: ignore[union-attr]

    return replace(eager.eager_kernel(), forward=forward, machine=lambda _: HOPPER)


@pytest.mark.parametrize(("cut", "rejected"), [(1, True), (8, True), (15, True), (16, False), (31, False)])
def test_partial_sums_in_sixteen_bits_are_rejected(cut: int, rejected: bool) -> None:
    """The two elements that the fuzzer shrank to, from keys 0 and 15 of 31."""
    q, k = torch.full((1, 1, 1, 1), 0.70703125).bfloat16(), torch.zeros(1, 1, 31, 1).bfloat16()
    k[..., 0, 0], k[..., 15, 0] = 3.078125, -5.28125
    v = torch.zeros(1, 1, 31, 2).bfloat16()
    v[..., 0, :], v[..., 15, :] = torch.tensor([0.50390625, 1.0234375]), torch.tensor([0.68359375, 1.1015625])
    mask = torch.zeros(1, 1, 1, 31, dtype=torch.bool)
    mask[..., [0, 15]] = True
    problem = Problem(q, k, v, scale=1.0, mask=mask)
    record = CHECKS["forward.bound"].on(Judged(_in_parts(cut), problem))
    assert (record.status is Status.FAIL) == rejected
    if rejected:
        assert record.margin == pytest.approx(1.2269724712137304, rel=1e-12)  # as it was recorded


class _Watch(TorchDispatchMode):
    """Notes the flags at every product of matrices, those of automatic differentiation too."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[list[bool]] = []

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        if op.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.bmm):
            self.seen.append([getattr(MATMUL, name) for name in FLAGS])
        return op(*args, **(kwargs or {}))


SPEC = ProblemSpec(dtype="bf16", num_queries=5, num_keys=7, head_dim=8, value_dim=8)


@pytest.mark.parametrize("default", [True, False])
def test_eager_asks_for_sums_in_fp32(default: bool, flags: dict[str, bool]) -> None:
    """In the forward and in the backward, whatever the flags are; they are as before afterwards."""
    for name in flags:
        setattr(MATMUL, name, default)
    kernel = eager.eager_kernel()
    assert kernel.backward is not None
    judged = Judged(kernel, SPEC.build())
    problem, stored = judged.gradient_problem, judged.stored
    with _Watch() as forward:
        kernel.forward(problem)
    with _Watch() as backward:
        kernel.backward(problem, *stored)
    assert forward.seen == [[False, False]] * 2
    assert backward.seen == [[False, False]] * 6
    assert [getattr(MATMUL, name) for name in FLAGS] == [default, default]


def test_flex_asks_for_sums_in_fp32(flags: dict[str, bool], monkeypatch: pytest.MonkeyPatch) -> None:
    """The same, seen beside its operators, which no mode looks into."""
    operators: Any = importlib.import_module("torch._higher_order_ops.flex_attention")
    seen = []

    def watched(place: Any, name: str) -> None:
        function = getattr(place, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            seen.append((name, [getattr(MATMUL, flag) for flag in FLAGS]))
            return function(*args, **kwargs)

        monkeypatch.setattr(place, name, call)

    watched(torch_flex, "attend")
    watched(operators, "create_fw_bw_graph")
    kernel = torch_flex.eager_kernel()
    assert kernel.backward is not None
    judged = Judged(kernel, SPEC.build())
    problem, stored = judged.gradient_problem, judged.stored
    kernel.forward(problem)
    assert seen[0] == ("attend", [False, False])
    seen.clear()
    kernel.backward(problem, *stored)
    assert seen == [("create_fw_bw_graph", [False, False])]
    assert {name: getattr(MATMUL, name) for name in FLAGS} == flags


def test_flags_come_back_after_an_error(flags: dict[str, bool]) -> None:
    MATMUL.allow_bf16_reduced_precision_reduction = (False, False)

    @sums_in_fp32()
    def fails() -> None:
        assert not any(getattr(MATMUL, name) for name in FLAGS)
        assert not MATMUL.allow_bf16_reduced_precision_reduction_split_k
        raise RuntimeError("here")

    with pytest.raises(RuntimeError, match="here"):
        fails()
    assert MATMUL.allow_fp16_reduced_precision_reduction == flags[FLAGS[0]]
    assert not MATMUL.allow_bf16_reduced_precision_reduction
    assert not MATMUL.allow_bf16_reduced_precision_reduction_split_k


def _products_in(dtype: torch.dtype | None) -> Kernel:
    """Finding 024: XLA's sum of products, each rounded into ``dtype``, summed in fp32."""

    def forward(p: Problem) -> ForwardResult:
        scores = (p.q.float() @ p.k.float().mT) * p.effective_scale
        hidden = torch.ones(p.num_queries, p.num_keys).triu(1).bool()
        weights = scores.masked_fill(hidden, -0.7 * torch.finfo(torch.float32).max).softmax(-1).half()
        products = weights.unsqueeze(-1).double() * p.v.unsqueeze(-3).double()
        return ForwardResult(products.to(dtype or torch.float64).double().sum(-2).half())

    here = replace(XLA_CAPABILITIES, devices=("cpu",))
    return Kernel("products", forward, capabilities=here, arithmetic=xla_arithmetic, machine=lambda _: HOPPER)


def test_products_rounded_before_they_are_summed_are_rejected() -> None:
    """The certificate's problem, with its margin."""
    spec = ProblemSpec(
        dtype="fp16",
        batch=2,
        num_heads=2,
        num_kv_heads=2,
        head_dim=1,
        value_dim=1,
        scale=0.25,
        causal="top_left",
        family="mixed",
        seed=464075860,
    )
    problem = spec.build()
    assert CHECKS["forward.bound"].on(Judged(_products_in(None), problem)).status is Status.PASS
    record = CHECKS["forward.bound"].on(Judged(_products_in(torch.float16), problem))
    assert record.status is Status.FAIL
    assert record.margin == pytest.approx(1.024452944259684, rel=1e-12)
