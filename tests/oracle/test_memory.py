"""Memory grows linearly with the length: no tensor larger than a row block or an input exists."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from flashcheck.oracle import fp64, ladder, ladder_backward
from flashcheck.oracle.parts import row_blocks
from flashcheck.problem import Problem

BLOCK_BYTES = 1 << 18
LENGTH = 512
DIM = 8
HEADS = 2


class Largest(TorchDispatchMode):
    """Bytes of the largest tensor that any operation returns."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for x in result if isinstance(result, tuple | list) else (result,):
            if isinstance(x, torch.Tensor):
                self.bytes = max(self.bytes, x.untyped_storage().nbytes())
        return result


def problem(n: int) -> Problem:
    gen = torch.Generator().manual_seed(0)
    q, k, v, dout = (torch.randn(1, HEADS, n, DIM, generator=gen).bfloat16() for _ in range(4))
    return Problem(q=q, k=k, v=v, dout=dout, causal="bottom_right", window=(300, None), softcap=20.0)


def limit(n: int) -> int:
    """Bytes: two row blocks, or an input in float64."""
    return max(2 * BLOCK_BYTES, 8 * HEADS * n * DIM)


def test_ladder_forward() -> None:
    p = problem(LENGTH)
    allowed = ladder.AllowedForward(
        torch.full(p.q.shape, 1.0).double(), torch.full(p.q.shape[:3], 1.0).double()
    )
    with Largest() as seen:
        ladder.forward(p, allowed, BLOCK_BYTES)
    assert BLOCK_BYTES // 4 < seen.bytes <= limit(LENGTH)


def test_ladder_backward() -> None:
    p = problem(LENGTH)
    with Largest() as seen:
        ladder_backward.backward(p, ladder_backward.like(p, torch.inf), block_bytes=BLOCK_BYTES)
    assert BLOCK_BYTES // 4 < seen.bytes <= limit(LENGTH)


def test_float64_in_row_blocks() -> None:
    n = LENGTH
    p = problem(n)
    blocks = list(row_blocks(p, HEADS, BLOCK_BYTES))
    with Largest() as seen:
        for rows in blocks:
            fp64.forward(p, rows)
            fp64.backward(p, rows=rows)
    assert seen.bytes <= limit(LENGTH)
    with Largest() as whole:
        fp64.forward(p)
    assert whole.bytes >= 8 * HEADS * n * n  # the measure can fail
