"""torch SDPA on CUDA: what each back end gives for a scale of 0 and below. Needs torch and a GPU, no more.

With scale = 0 every score is 0, so the output is the mean of the values. Exit code 1: some back end
differs.
"""

import sys

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

print(torch.__version__, torch.cuda.get_device_name())
backends = (SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION)
generator = torch.Generator().manual_seed(0)
q, k, v = (torch.randn(1, 2, 31, 64, generator=generator).half().cuda() for _ in range(3))
wrong = 0
for scale in (0.0, -0.125):
    for causal in (False, True):
        hidden = torch.ones(31, 31, device="cuda").triu(1).bool() & causal
        scores = (q.double() @ k.double().mT * scale).masked_fill(hidden, -torch.inf)
        expected = torch.softmax(scores, -1) @ v.double()
        for backend in backends:
            case = f"scale={scale} causal={causal} {backend.name}"
            try:
                with sdpa_kernel(backend):
                    got = scaled_dot_product_attention(q, k, v, scale=scale, is_causal=causal).double()
                nans, error = int(got.isnan().sum()), float((got - expected).abs().nan_to_num(0).max())
            except RuntimeError as refused:
                print(f"{case}: refused: {str(refused)[:80]}")
                continue
            bad = nans > 0 or error > 2e-3
            wrong += bad
            verdict = "WRONG" if bad else "right"
            print(f"{case}: {nans} NaN of {got.numel()}, largest error {error:.2g}: {verdict}")
sys.exit(wrong > 0)
