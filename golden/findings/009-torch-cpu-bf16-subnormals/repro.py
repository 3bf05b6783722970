"""torch on the CPU in bf16: products with values below 2^-126, by size. Needs torch, no more.

Every product below has one term, and its exact result is a bf16 number. Exit code 1: some size loses it.
"""

import sys

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

print(torch.__version__, torch.backends.cpu.get_cpu_capability())
wrong = 0
for size in (8, 16, 32, 64):
    a, b = (torch.zeros(size, size, dtype=torch.bfloat16) for _ in range(2))
    a[:, 0], b[0] = 2.0**-130, 2.0**20  # the product is 2^-110
    operand = float((a @ b)[0, 0])
    a[:, 0], b[0] = 2.0**-64, 2.0**-64  # the product is 2^-128
    result = float((a @ b)[0, 0])
    wrong += (operand, result) != (2.0**-110, 2.0**-128)
    print(f"{size} x {size}: 2^-130 * 2^20 gives {operand!r}, 2^-64 * 2^-64 gives {result!r}")
generator = torch.Generator().manual_seed(0)
q, k = (torch.randn(1, 2, 32, 64, generator=generator).bfloat16() for _ in range(2))
v = torch.full_like(q, 2.0**-128)  # so is every output
for backend in (SDPBackend.MATH, SDPBackend.FLASH_ATTENTION):
    with sdpa_kernel(backend):
        out = scaled_dot_product_attention(q, k, v)
    zeros = int((out == 0).sum())
    wrong += zeros > 0
    print(f"{backend.name}: {zeros} of {out.numel()} outputs are 0; the first is {float(out.flatten()[0])!r}")
sys.exit(wrong > 0)
