"""Compiled flex_attention of fewer than 128 queries on keys far apart: does it compile? Needs torch, a GPU.

The last key lies 2^31 elements behind the first, so that offsets need 64 bits. Exit code 1: it does not.
"""

import sys

import torch
from torch.nn.attention.flex_attention import flex_attention

print(torch.__version__, torch.cuda.get_device_name())
compiled = torch.compile(flex_attention, dynamic=False)
queries, dim = 32, 64
room = torch.empty(2**31 + 2**20, dtype=torch.float16, device="cuda")
step = 2**31 // (queries - 1) // 64 * 64 + 64
wrong = 0
for name, kernel_options in (("as it comes", {}), ("main kernel", {"FORCE_USE_FLEX_ATTENTION": True})):
    k = room.as_strided((1, 1, queries, dim), (0, 0, step, 1))
    k.normal_()
    q, v = (torch.randn(1, 1, queries, dim, dtype=torch.float16, device="cuda") for _ in range(2))
    try:
        out = compiled(q, k, v, kernel_options=kernel_options)
        exact = torch.softmax(q.double() @ k.double().mT / dim**0.5, -1) @ v.double()
        print(f"{name}: largest error {float((out - exact).abs().max()):.2g}")
    except Exception as error:
        line = next(x for x in str(error).splitlines()[::-1] if "rror" in x)
        print(f"{name}: {type(error).__name__}: {line.strip()}")
        wrong += 1
sys.exit(wrong > 0)
