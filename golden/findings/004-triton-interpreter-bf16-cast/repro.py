"""Triton's interpreter: fp32 to bf16. Needs torch and triton, no GPU.

Compiled Triton rounds to nearest even, and so does torch. Exit code 1: the interpreter differs.
"""

import os
import sys

os.environ["TRITON_INTERPRET"] = "1"

import torch
import triton
import triton.language as tl


@triton.jit
def cast(x_ptr, y_ptr, n: tl.constexpr):
    i = tl.arange(0, n)
    tl.store(y_ptr + i, tl.load(x_ptr + i).to(tl.bfloat16))


print("torch", torch.__version__, "triton", triton.__version__)
n = 65536
x = torch.randn(n, generator=torch.Generator().manual_seed(0))
x[0], x[1], x[2] = 1.00390625 + 2.0**-20, torch.finfo(torch.float32).max, 0.99999994
y = torch.zeros(n, dtype=torch.bfloat16)
cast[(1,)](x, y, n=n)
for i in range(3):
    print(f"{float(x[i])!r}: expected {float(x[i].bfloat16())!r}, got {float(y[i])!r}")
differ, truncated = (y != x.bfloat16()), (x.view(torch.int32) & -65536).view(torch.float32).bfloat16()
same = int((y == truncated).sum())
print(f"{int(differ.sum())} of {n} differ from rounding to nearest; {same} are truncated")
error = (y.double() - x.double())[3:] / x.double()[3:]
print(f"mean relative error: {float(error.mean()):.3g} (toward zero)")
sys.exit(bool(differ.any()))
