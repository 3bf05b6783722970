"""Triton's interpreter: fp32 to e4m3 and e5m2. Needs torch and triton, no GPU.

Expected is rounding to nearest even, as torch and compiled Triton round. Numbers of normal size alone, well
inside the range. Exit code 1: the interpreter differs.
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
    tl.store(y_ptr + i, tl.load(x_ptr + i).to(y_ptr.dtype.element_ty))


print("torch", torch.__version__, "triton", triton.__version__)
n = 65536
x = torch.rand(n, generator=torch.Generator().manual_seed(0)) * 7 + 1
x[:4] = torch.tensor([1.96, 7.97, 1.0625, 1.125])
wrong = 0
for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
    y = torch.zeros(n, dtype=dtype)
    cast[(1,)](x, y, n=n)
    expected, got = x.to(dtype).float(), y.float()
    for i in range(4):
        mark = "" if expected[i] == got[i] else "  WRONG"
        print(f"{dtype} {float(x[i]):g}: expected {float(expected[i]):g}, got {float(got[i]):g}{mark}")
    halved = int((got < 0.75 * expected).sum())
    count = int((expected != got).sum())
    print(f"{dtype}: {count} of {n} differ, {halved} come out at about half")
    wrong += count
sys.exit(wrong > 0)
