"""Faults that were found on a GPU (golden/findings), planted in kernels that run here: each is rejected, and
the same kernel where the fault has no effect is not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from flashcheck.adapters import triton_tutorial
from flashcheck.adapters.torch_sdpa_cuda import cudnn_kernel
from flashcheck.arithmetic import ARITHMETICS, HOPPER
from flashcheck.checks import CHECKS, Judged
from flashcheck.checks.record import Status
from flashcheck.emulator import as_kernel
from flashcheck.kernel import ForwardResult, Kernel
from flashcheck.plan import make_plan
from flashcheck.problem import Problem


def _open_window_is_the_longest_sequence() -> Kernel:
    """Finding 016: FlashAttention-2's right side of a window, where the caller set none."""
    kernel = as_kernel(ARITHMETICS["flash.bf16"], name="open window")

    def changed(p: Problem) -> Problem:
        assert p.window is not None
        longest = p.num_keys if p.cu_seqlens_k is None else int(p.cu_seqlens_k.diff().max())
        return p.replaced(window=(p.window[0], longest))

    return replace(kernel, forward=lambda p: kernel.forward(changed(p)))


@pytest.mark.parametrize(
    ("lengths", "rejected"),
    [
        ([(2, 1)], False),
        ([(3, 1)], True),
        ([(6, 5)], False),
        ([(7, 5)], True),
        ([(9, 3), (1, 8)], False),
        ([(9, 3), (1, 7)], True),
    ],
)
def test_a_window_that_is_open_to_the_right_hides_no_key(
    lengths: list[tuple[int, int]], rejected: bool
) -> None:
    ends = [torch.tensor([0, *side]).cumsum(0) for side in zip(*lengths, strict=True)]
    rows, keys = (int(end[-1]) for end in ends)
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(1, 1, n, 8, generator=generator).bfloat16() for n in (rows, keys, keys))
    packed = {} if len(lengths) == 1 else {"cu_seqlens_q": ends[0], "cu_seqlens_k": ends[1]}
    p = Problem(q, k, v, window=(1, None), **packed)
    record = CHECKS["forward.bound"].on(Judged(_open_window_is_the_longest_sequence(), p))
    assert (record.status is Status.FAIL) == rejected


def _cudnn_with_delta(minus_infinity: float) -> Kernel:
    """Finding 017: cuDNN's declaration, and a backward that takes ``minus_infinity`` for a delta of -inf."""

    def backward(p: Problem, out: Tensor, lse: Tensor) -> Mapping[str, Tensor]:
        assert p.dout is not None
        delta = (p.dout.float() * out.float()).sum(-1, keepdim=True)
        delta = torch.where(delta == -torch.inf, minus_infinity, delta)
        weights = (p.q.float() @ p.k.float().mT * p.effective_scale - lse.unsqueeze(-1)).exp()
        dp = (p.dout.double() @ p.v.double().mT).float()
        ds = (weights * (dp - delta) * p.effective_scale).bfloat16().float()
        dq, dk = ds @ p.k.float(), ds.mT @ p.q.float()
        dv = weights.bfloat16().float().mT @ p.dout.float()
        return {"dq": dq.bfloat16(), "dk": dk.bfloat16(), "dv": dv.bfloat16()}

    there = cudnn_kernel()
    here = replace(there.capabilities, devices=("cpu",))
    return replace(there, capabilities=here, backward=backward, machine=lambda _: HOPPER)


@pytest.mark.parametrize("size", [2.0, 1.0])
@pytest.mark.parametrize("instead", [0.0, -torch.inf], ids=["zero", "kept"])
def test_a_delta_that_overflows_is_not_zero(instead: float, size: float) -> None:
    """The case that the fuzzer shrank on an H200, and half of it, where nothing overflows."""
    q, dout = (torch.zeros(1, 1, 1, 24).bfloat16() for _ in range(2))
    k, v = (torch.zeros(1, 1, 2, 24).bfloat16() for _ in range(2))
    k[..., 1, 23] = 1.0
    v[..., 12], v[..., 15] = 2.0**127, -(2.0**127)
    dout[..., 12], dout[..., 15] = -size, -size / 2
    judged = Judged(_cudnn_with_delta(instead), Problem(q, k, v, scale=1.0, dout=dout))
    record = CHECKS["backward.bound"].on(judged)
    if instead == 0.0 and size == 2.0:
        assert record.status is Status.FAIL
        assert record.margin == pytest.approx(123574.96959329885, rel=1e-12)  # as it was recorded there
        assert float(judged.gradients["dq"][..., 23]) == -(2.0**126)
    else:
        assert record.status is Status.PASS


def _tuned(key_has_causality: bool) -> Kernel:
    """Finding 019: a call takes the tiles of the first of its key; those of a call that was not causal have
    fewer rows than keys here, and a causal one walks past its diagonal with them."""
    tiles: dict[object, tuple[int, int]] = {}

    def forward(p: Problem) -> ForwardResult:
        causal = p.causal is not None
        key = (p.num_keys, p.head_dim, causal and key_has_causality)
        rows, keys = tiles.setdefault(key, (128, 64) if causal else (64, 128))
        i, j = torch.arange(p.num_queries)[:, None], torch.arange(p.num_keys)
        first = i // rows * rows
        counted = (j < (first + keys - 1) // keys * keys).double() + ((j >= first) & (j <= i)).double()
        scores = p.q.double() @ p.k.double().mT * p.effective_scale
        weights = (scores + (counted.log() if causal else 0.0)).softmax(-1)
        return ForwardResult((weights @ p.v.double()).half())

    here = replace(triton_tutorial.CAPABILITIES, devices=("cpu",))
    arithmetic = triton_tutorial.tutorial_arithmetic
    return Kernel("tuned", forward, capabilities=here, arithmetic=arithmetic, machine=lambda _: HOPPER)


@pytest.mark.parametrize("key_has_causality", [False, True])
@pytest.mark.parametrize("causal", [None, "top_left"])
def test_tiles_kept_without_causality_are_found(causal: str | None, key_has_causality: bool) -> None:
    g = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(1, 1, 256, 128, generator=g).half() for _ in range(3))
    kernel = _tuned(key_has_causality)
    judged = Judged(kernel, Problem(q, k, v, causal=causal))
    assert CHECKS["forward.bound"].on(judged).status is Status.PASS  # whatever comes first is right
    record = CHECKS["state.interleaved"].on(judged)
    wrong = causal is None and not key_has_causality
    assert record.status is (Status.FAIL if wrong else Status.PASS)
    assert ("causal=top_left" in record.message) == wrong
    later = Judged(kernel, Problem(q, k, v, causal="top_left"))
    assert CHECKS["forward.bound"].on(later).failed == wrong


def _cudnn_without_a_mask_of_whole_tiles() -> Kernel:
    """Finding 022: keys come in pairs of tiles of 64; a last pair whose first tile is full is not masked."""

    def backward(p: Problem, out: Tensor, lse: Tensor) -> Mapping[str, Tensor]:
        assert p.dout is not None
        more = 64 if p.num_keys % 128 == 64 else 0
        k, v = (x.repeat_interleave(p.group, 1).float() for x in (p.k, p.v))
        k, v = (torch.nn.functional.pad(x, (0, 0, 0, more)) for x in (k, v))
        delta = (p.dout.float() * out.float()).sum(-1, keepdim=True)
        weights = (p.q.float() @ k.mT * p.effective_scale - lse.unsqueeze(-1)).exp()
        ds = (weights * (p.dout.float() @ v.mT - delta) * p.effective_scale).to(p.q.dtype).float()
        dk, dv = ds.mT @ p.q.float(), weights.to(p.q.dtype).float().mT @ p.dout.float()
        summed = {
            name: x[..., : p.num_keys, :].to(p.q.dtype).unflatten(1, (-1, p.group)).sum(2)
            for name, x in (("dk", dk), ("dv", dv))
        }
        return {"dq": (ds @ k).to(p.q.dtype), **summed}

    there = cudnn_kernel()
    here = replace(there.capabilities, devices=("cpu",))
    return replace(there, capabilities=here, backward=backward, machine=lambda _: HOPPER)


@pytest.mark.parametrize(
    ("dtype", "keys", "score", "rejected"),
    [
        (torch.float16, 64, -24.0, True),
        (torch.float16, 192, -24.0, True),
        (torch.float16, 64, -4.0, False),
        (torch.float16, 63, -24.0, False),
        (torch.float16, 128, -24.0, False),
        (torch.bfloat16, 64, -24.0, False),
    ],
)
def test_keys_that_pad_a_tile_make_no_gradient_infinite(
    dtype: torch.dtype, keys: int, score: float, rejected: bool
) -> None:
    g = torch.Generator().manual_seed(1)
    q, k = torch.zeros(1, 1, 2, 16).to(dtype), torch.zeros(1, 1, keys, 16).to(dtype)
    q[..., 0], k[..., 0] = 1.0, score
    v, dout = (torch.randn(1, 1, n, 16, generator=g).to(dtype) for n in (keys, 2))
    judged = Judged(_cudnn_without_a_mask_of_whole_tiles(), Problem(q, k, v, scale=1.0, dout=dout))
    record = CHECKS["backward.bound"].on(judged)
    assert (record.status is Status.FAIL) == rejected
    assert bool(torch.isnan(judged.gradients["dq"]).any()) == rejected


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_level_standard_meets_keys_that_pad_a_tile(dtype: str) -> None:
    kernel = _cudnn_without_a_mask_of_whole_tiles()
    plan = make_plan(kernel, "standard", (dtype,))
    cases = [case for case in plan.cases if case.reason.startswith("whole tiles")]
    assert len(cases) == 4
    assert all("backward.bound" in case.checks for case in cases)
    rejected = [
        case.spec.num_keys
        for case in cases
        if CHECKS["backward.bound"].on(Judged(kernel, case.spec.build())).status is Status.FAIL
    ]
    assert rejected == [64, 192]
