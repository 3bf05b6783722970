"""Launches that recur give the driver what the first one gave it; run as a program by test_compiles.py."""

import sys

import torch
from triton.compiler.compiler import LazyDict

from kernels import options, tuning
from kernels.backward_delta import launch_delta
from kernels.bench.host import launch_nothing
from kernels.hopper.backward_dkdv import launch_hopper_dkdv
from kernels.hopper.backward_dq import launch_hopper_dq
from kernels.hopper.forward import launch_hopper_forward
from kernels.hopper.pipelined import launch_hopper_pipelined
from kernels.operands import Operands
from kernels.score_path import plain_path

TILE = tuning.Tile(64, 64, 4, 1)
ENDS = {length: torch.tensor([0, 30, length], dtype=torch.int32) for length in (80, 96)}


def plain(x):
    """What counts of an argument: of tensors and descriptors all but where they are."""
    if isinstance(x, torch.Tensor):
        return "tensor", tuple(x.shape), x.stride(), x.dtype
    if hasattr(x, "block_shape"):
        return type(x), *(plain(y) for _, y in sorted(vars(x).items()))
    if isinstance(x, LazyDict):  # for profilers
        return type(x)
    return (type(x), x) if not isinstance(x, (list, tuple)) else tuple(map(plain, x))


def call(seed, packed=False, offset=0, length=80, causal="top_left"):
    """All launches of a forward and a backward; ``offset``: of the log-sum-exp in its memory."""
    packing = {"cu_seqlens_q": ENDS[length], "cu_seqlens_k": ENDS[length]} if packed else {}
    generator = torch.Generator().manual_seed(seed)
    q, k, dout = (torch.randn(1, heads, length, 64, generator=generator).half() for heads in (4, 2, 4))
    parsed = options.parse_options(q, k, causal=causal, **packing)
    out, _ = launch_hopper_forward(q, k, k, parsed, TILE)
    launch_hopper_pipelined(Operands(q, k, k), parsed, plain_path(q.dtype), tuning.Tile(128, 64, 8, 2))
    delta = launch_delta(dout, out, None)
    lse = torch.empty(4 * length + offset)[offset:].view(1, 4, length)
    launch_hopper_dq(dout, q, k, k, lse, delta, parsed, TILE)
    launch_hopper_dkdv(dout, q, k, k, lse, delta, parsed, TILE)


def check(seen, packed):
    seen.clear()
    call(0, packed)
    first = list(seen)
    assert len(first) == 5
    seen.clear()
    call(1, packed)
    assert [x[0] for x in seen] == [x[0] for x in first], "another compiled kernel"
    for again, before in zip(seen, first, strict=True):
        assert list(map(plain, again[1:])) == list(map(plain, before[1:])), again[0].name
        tensors = [
            (a, b) for a, b in zip(again, before, strict=True) if hasattr(a, "data_ptr") and a is not ENDS[80]
        ]
        assert tensors
        assert all(a is not b for a, b in tensors), "a tensor of the first call"
    for change, kernels in (({"offset": 1}, 2), ({"causal": None}, 4)):
        seen.clear()
        call(2, packed, **change)
        assert sum(x[0] is not y[0] for x, y in zip(seen, first, strict=True)) == kernels, change
    seen.clear()
    call(2, packed, length=96)
    assert [x[0] for x in seen] == [x[0] for x in first], "compiled for a length"
    assert all(x[1] != y[1] or x[1:] != y[1:] for x, y in zip(seen, first, strict=True))


def main():
    seen = []
    launch_nothing(seen)
    check(seen, packed=False)
    check(seen, packed=True)
    # Other segments in tensors that look the same: the launches get these, and nothing of those before.
    old, ENDS[80] = ENDS[80], torch.tensor([0, 50, 80], dtype=torch.int32)
    seen.clear()
    call(3, packed=True)
    given = [x for launch in seen for x in launch if isinstance(x, torch.Tensor)]
    assert sum(x is ENDS[80] for x in given) == 8
    assert not any(x is old for x in given)
    sys.stdout.write("as before")


if __name__ == "__main__":
    main()
