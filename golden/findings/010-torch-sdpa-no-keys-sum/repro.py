"""torch SDPA without keys: O is NaN where the sum over all of q leaves the format. Needs torch alone.

Without keys every row is empty and O is 0, whatever q holds. Exit code 1: something else, in some dtype.
"""

import sys

import torch
from torch.nn.functional import scaled_dot_product_attention

print("torch", torch.__version__)
wrong = 0
for dtype, size in (
    (torch.float16, 10.0),
    (torch.float16, 100.0),
    (torch.bfloat16, 3e37),
    (torch.float32, 3e37),
):
    q = torch.full((1, 2, 17, 64), size, dtype=dtype)
    k = v = torch.zeros((1, 2, 0, 64), dtype=dtype)
    nans = int(scaled_dot_product_attention(q, k, v).isnan().sum())
    wrong += nans > 0
    verdict = "WRONG" if nans else "right"
    print(f"{dtype}, every q = {size:g}: {nans} NaN of {q.numel()}: {verdict}")
sys.exit(wrong > 0)
