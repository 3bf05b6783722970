"""torch SDPA on the CPU, flash back end: rows that have no value come out as 0. Needs torch alone.

A NaN in a row of q makes every score of that row NaN. An infinity in k, where q is positive, makes one score
of every row +inf: inf - inf is NaN. The math back end says NaN in both cases. Exit code 1: a back end gives a
finite number.
"""

import sys

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

print("torch", torch.__version__)
generator = torch.Generator().manual_seed(0)
wrong = 0
for dtype in (torch.float32, torch.float16, torch.bfloat16):
    for case in ("NaN in q", "inf in k"):
        for num_keys in (8, 32):
            q, k, v = (
                torch.rand(1, 1, n, 16, generator=generator).to(dtype) for n in (8, num_keys, num_keys)
            )
            if case == "NaN in q":
                q[0, 0, 3, 5] = torch.nan
            else:
                k[0, 0, 7, 5] = torch.inf
            for backend in (SDPBackend.MATH, SDPBackend.FLASH_ATTENTION):
                with sdpa_kernel(backend):
                    got = scaled_dot_product_attention(q, k, v)[0, 0, 3]
                bad = bool(got.isfinite().any())
                wrong += bad
                shown = f"{float(got[0]):g}, ..., finite: WRONG" if bad else "NaN: right"
                print(f"{dtype}, {case}, {num_keys} keys, {backend.name}: row 3 is {shown}")
sys.exit(wrong > 0)
