"""torch SDPA on CUDA in bf16: values below 2^-126 in, what comes out? Needs torch and a GPU, no more.

All values are 2^-128, which bf16 holds, so every output is 2^-128. Exit code 1: some back end differs.
"""

import sys

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

print(torch.__version__, torch.cuda.get_device_name())
generator = torch.Generator().manual_seed(0)
q, k = (torch.randn(1, 2, 32, 64, generator=generator).bfloat16().cuda() for _ in range(2))
v = torch.full_like(q, 2.0**-128)
wrong = 0
for backend in (
    SDPBackend.MATH,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.CUDNN_ATTENTION,
):
    with sdpa_kernel(backend):
        out = scaled_dot_product_attention(q, k, v)
    zeros = int((out == 0).sum())
    wrong += zeros > 0
    print(f"{backend.name}: {zeros} of {out.numel()} outputs are 0; the first is {float(out.flatten()[0])!r}")
sys.exit(wrong > 0)
