"""Faults of FlashAttention-4 that were found on an H200 (golden/findings/020, 021), planted in its declared
arithmetic: each is rejected as it was there, and the same kernel where the fault has no effect is not."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from flashcheck.adapters.flash_attn import four_arithmetic
from flashcheck.arithmetic import ARITHMETICS, HOPPER, Arithmetic
from flashcheck.checks import CHECKS, Judged
from flashcheck.checks.record import Status
from flashcheck.emulator import as_kernel
from flashcheck.emulator.backward import backward
from flashcheck.emulator.forward import forward
from flashcheck.emulator.tiles import concrete
from flashcheck.inputs.spec import ProblemSpec
from flashcheck.kernel import ForwardResult, Kernel
from flashcheck.problem import Problem

ROWS, COLUMNS = 64, 8


def _declared(problem: Problem) -> Arithmetic:
    return concrete(four_arithmetic(problem))


def _honest() -> Kernel:
    there = as_kernel(ARITHMETICS["flash.bf16"], HOPPER, name="flash_attn.4 as declared")
    return replace(
        there,
        forward=lambda p: forward(p, _declared(p), HOPPER),
        backward=lambda p, out, lse: backward(p, out, lse, _declared(p), HOPPER),
        capabilities=replace(there.capabilities, dtypes=("fp16", "bf16")),
        arithmetic=four_arithmetic,
    )


def _moved(x: Tensor) -> Tensor:
    """What is read, by multiples of 32 columns, of blocks that were written by multiples of 16."""
    length, dim = x.shape[-2:]
    written, read = (-(-dim // unit) * unit // COLUMNS for unit in (16, 32))
    groups = -(-length // 128) * 2
    padding = (0, written * COLUMNS - dim, 0, groups * ROWS - length)
    whole = torch.nn.functional.pad(x, padding)
    blocks = (
        whole.unflatten(-1, (written, COLUMNS)).unflatten(2, (groups, ROWS)).transpose(3, 4).flatten(2, 3)
    )
    memory = torch.nn.functional.pad(blocks, (0, 0, 0, 0, 0, groups * (read - written)))
    back = memory.unflatten(2, (groups, read)).transpose(3, 4).flatten(4, 5).flatten(2, 3)
    return back[:, :, :length, :dim]


def _padded_differently() -> Kernel:
    """Finding 020: accumulators of one width are read with another."""
    honest = _honest()
    assert honest.backward is not None
    right = honest.backward

    def wrong(p: Problem, out: Tensor, lse: Tensor) -> Mapping[str, Tensor]:
        found = dict(right(p, out, lse))
        through_memory = ("dq", "dk", "dv") if p.group > 1 else ("dq",)
        return found | {name: _moved(found[name]) for name in through_memory}

    return replace(honest, backward=wrong)


@pytest.mark.parametrize(
    ("spec", "margin", "over"),
    [
        (
            ProblemSpec(
                dtype="bf16",
                num_heads=6,
                num_kv_heads=2,
                num_queries=97,
                num_keys=3,
                scale=0.25,
                window=(None, 2),
                family="spiked",
                seed=1856670430,
            ),
            489.5547496130711,
            "dQ: 369 of 9,312",
        ),
        (
            ProblemSpec(
                dtype="bf16",
                num_heads=4,
                num_kv_heads=2,
                num_queries=65,
                num_keys=65,
                scale=1.0,
                window=(31, None),
                softcap=1.0,
                sink="low",
                family="very_negative",
                gradient="huge",
                seed=1253544563,
            ),
            17.446995191705668,
            "dV: 29 of 2,080",
        ),
    ],
    ids=["dQ", "dV"],
)
def test_the_recorded_problems(spec: ProblemSpec, margin: float, over: str) -> None:
    problem = spec.build()
    assert CHECKS["backward.bound"].on(Judged(_honest(), problem)).status is Status.PASS
    record = CHECKS["backward.bound"].on(Judged(_padded_differently(), problem))
    assert record.status is Status.FAIL
    assert record.margin == pytest.approx(margin, rel=1e-12)
    assert record.evidence[0].startswith(over)


@pytest.mark.parametrize(
    ("head_dim", "queries", "heads", "rejected"),
    [
        (8, 64, 2, False),
        (8, 65, 1, True),
        (24, 129, 2, False),
        (40, 65, 1, True),
        (72, 65, 1, True),
        (88, 65, 1, False),
        (112, 65, 1, True),
        (128, 65, 1, False),
    ],
)
def test_gradients_read_with_another_width_are_rejected(
    head_dim: int, queries: int, heads: int, rejected: bool
) -> None:
    spec = ProblemSpec(
        dtype="bf16", num_heads=heads, num_queries=queries, head_dim=head_dim, value_dim=head_dim, seed=1
    )
    record = CHECKS["backward.bound"].on(Judged(_padded_differently(), spec.build()))
    assert (record.status is Status.FAIL) == rejected


def _sink_after_the_scores() -> Kernel:
    """Finding 021: the sink's exponential is taken relative to the largest score alone."""
    honest = _honest()
    log2e = torch.tensor(math.log2(math.e))

    def wrong(p: Problem) -> ForwardResult:
        assert p.sink is not None
        scaled = (p.q.float() @ p.k.float().mT) * (p.effective_scale * log2e)
        largest = scaled.amax(-1)
        total = torch.exp2(scaled - largest[..., None]).sum(-1)
        total = total + torch.exp2(p.sink.float()[:, None] * log2e - largest)
        out = honest.forward(p).out
        return ForwardResult(out, ((largest + total.log2()) * math.log(2.0)).float())

    return replace(honest, forward=wrong)


@pytest.mark.parametrize(("score", "rejected"), [(-282.0, True), (-90.0, True), (-88.0, False), (3.0, False)])
def test_an_lse_that_a_large_sink_makes_infinite_is_rejected(score: float, rejected: bool) -> None:
    q, k, v = (torch.zeros(1, 1, 1, 24).bfloat16() for _ in range(3))
    q[..., 0], k[..., 0] = 1.0, score
    problem = Problem(q, k, v, scale=1.0, sink=torch.zeros(1))
    assert CHECKS["forward.bound"].on(Judged(_honest(), problem)).status is Status.PASS
    judged = Judged(_sink_after_the_scores(), problem)
    assert (CHECKS["forward.bound"].on(judged).status is Status.FAIL) == rejected
    lse = judged.result.lse
    assert lse is not None
    assert bool(torch.isinf(lse).any()) == rejected
