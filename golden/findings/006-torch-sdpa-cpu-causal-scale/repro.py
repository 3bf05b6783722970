"""torch SDPA on the CPU, flash back end: causal with a scale of 0 or below. Needs torch alone.

With scale = 0 every visible score is 0, so row i is the mean of the first i + 1 values. Exit code 1: NaN, or
another error, in some back end.
"""

import sys

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

print("torch", torch.__version__)
generator = torch.Generator().manual_seed(0)
q, k, v = (torch.randn(1, 2, 31, 16, generator=generator) for _ in range(3))
wrong = 0
for scale in (0.25, 0.0, -0.25):
    for causal in (False, True):
        hidden = torch.ones(31, 31).triu(1).bool() & causal
        scores = (q.double() @ k.double().mT * scale).masked_fill(hidden, -torch.inf)
        expected = torch.softmax(scores, -1) @ v.double()
        for backend in (SDPBackend.MATH, SDPBackend.FLASH_ATTENTION):
            with sdpa_kernel(backend):
                got = scaled_dot_product_attention(q, k, v, scale=scale, is_causal=causal).double()
            nans, error = int(got.isnan().sum()), float((got - expected).abs().nan_to_num(0).max())
            bad = nans > 0 or error > 1e-5
            wrong += bad
            verdict = "WRONG" if bad else "right"
            print(f"scale={scale} causal={causal} {backend.name}: {nans} NaN of {got.numel()}: {verdict}")
sys.exit(wrong > 0)
