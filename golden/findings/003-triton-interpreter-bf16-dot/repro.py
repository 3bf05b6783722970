"""Triton's interpreter: ``tl.dot`` of bf16 tensors. Needs torch and triton, no GPU.

Small integers, so that every product and sum is exact in every format. Exit code 1: a dot is wrong.
"""

import os
import sys

os.environ["TRITON_INTERPRET"] = "1"

import torch
import triton
import triton.language as tl


@triton.jit
def dot(a_ptr, b_ptr, c_ptr, n: tl.constexpr):
    i, j = tl.arange(0, n)[:, None], tl.arange(0, n)[None, :]
    tl.store(c_ptr + i * n + j, tl.dot(tl.load(a_ptr + i * n + j), tl.load(b_ptr + i * n + j)))


print("torch", torch.__version__, "triton", triton.__version__)
n = 16
generator = torch.Generator().manual_seed(0)
a, b = (torch.randint(-2, 3, (n, n), generator=generator) for _ in range(2))
expected = a.double() @ b.double()
wrong = 0
for dtype in (torch.float32, torch.float16, torch.bfloat16):
    got = torch.zeros(n, n)
    dot[(1,)](a.to(dtype), b.to(dtype), got, n=n)
    error = float((got.double() - expected).abs().max())
    wrong += error > 0
    print(f"{dtype}: expected {expected[0, 1]:g}, got {got[0, 1]:g}; largest error {error:.3g}")
sys.exit(wrong > 0)
