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


def plain(x):
    """What counts of an argument: of tensors and descriptors all but where they are."""
    if isinstance(x, torch.Tensor):
        return "tensor", tuple(x.shape), x.stride(), x.dtype
    if hasattr(x, "block_shape"):
        return type(x), *(plain(y) for _, y in sorted(vars(x).items()))
    if isinstance(x, LazyDict):  # for profilers
        return type(x)
    return (type(x), x) if not isinstance(x, (list, tuple)) else tuple(map(plain, x))


def call(seed, offset=0, length=80, causal="top_left"):
    """All launches of a forward and a backward; ``offset``: of the log-sum-exp in its memory."""
    generator = torch.Generator().manual_seed(seed)
    q, k, dout = (torch.randn(1, heads, length, 64, generator=generator).half() for heads in (4, 2, 4))
    parsed = options.parse_options(q, k, causal=causal)
    out, _ = launch_hopper_forward(q, k, k, parsed, TILE)
    launch_hopper_pipelined(Operands(q, k, k), parsed, plain_path(q.dtype), tuning.Tile(128, 64, 8, 2))
    delta = launch_delta(dout, out, None)
    lse = torch.empty(4 * length + offset)[offset:].view(1, 4, length)
    launch_hopper_dq(dout, q, k, k, lse, delta, parsed, TILE)
    launch_hopper_dkdv(dout, q, k, k, lse, delta, parsed, TILE)


def main():
    seen = []
    launch_nothing(seen)
    call(0)
    first = list(seen)
    assert len(first) == 5
    seen.clear()
    call(1)
    assert [x[0] for x in seen] == [x[0] for x in first], "another compiled kernel"
    for again, before in zip(seen, first, strict=True):
        assert list(map(plain, again[1:])) == list(map(plain, before[1:])), again[0].name
        tensors = [(a, b) for a, b in zip(again, before, strict=True) if hasattr(a, "data_ptr")]
        assert tensors
        assert all(a is not b for a, b in tensors), "a tensor of the first call"
    for change, kernels in (({"offset": 1}, 2), ({"causal": None}, 4)):
        seen.clear()
        call(2, **change)
        assert sum(x[0] is not y[0] for x, y in zip(seen, first, strict=True)) == kernels, change
    seen.clear()
    call(2, length=96)
    assert [x[0] for x in seen] == [x[0] for x in first], "compiled for a length"
    assert all(x[1] != y[1] or x[1:] != y[1:] for x, y in zip(seen, first, strict=True))
    sys.stdout.write("as before")


if __name__ == "__main__":
    main()
