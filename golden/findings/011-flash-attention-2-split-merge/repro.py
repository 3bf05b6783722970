"""FlashAttention-2 with split keys: do the weights of the parts add up to 1? Needs torch; better with a GPU.

All scores are one number and all values are 1, so every output is 1. Few heads, few queries and many keys
make torch split the keys. Without a GPU the merge is done as the source writes it, in fp32. Exit code 1: some
output is off by more than 16-bit formats round.
"""

import sys

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

KEYS, DIM, PART = 2048, 64, 256


def as_written(score: float) -> float:
    """combine_attn_seqk_parallel: every part's LSE, the LSE of those, and exp of their differences."""
    parts = KEYS // PART
    own = torch.tensor(score) + torch.tensor(float(PART)).log()
    of_all = (torch.full((parts,), float(own)) - own).exp().sum().log() + own
    return float((own - of_all).exp() * parts)


def attention(score: float, backend: SDPBackend) -> float:
    q = torch.zeros(1, 1, 16, DIM, dtype=torch.float16, device="cuda")
    k = torch.zeros(1, 1, KEYS, DIM, dtype=torch.float16, device="cuda")
    root = 2.0**13  # fp16 holds both factors of every score
    q[..., 0], k[..., 0] = score / root, root
    with sdpa_kernel(backend):
        out = scaled_dot_product_attention(q, k, torch.ones_like(k), scale=1.0)
    return float(out.flatten()[0])


gpu = torch.cuda.is_available()
print(torch.__version__, torch.cuda.get_device_name() if gpu else "no GPU: as the source writes it")
wrong = 0
for power in (10, 14, 17, 20, 23, 26):
    score = 2.0**power
    found = attention(score, SDPBackend.FLASH_ATTENTION) if gpu else as_written(score)
    other = f", EFFICIENT_ATTENTION {attention(score, SDPBackend.EFFICIENT_ATTENTION):.6g}" if gpu else ""
    wrong += abs(found - 1) > 2.0**-8
    print(f"scores 2^{power}: FLASH_ATTENTION {found:.6g}{other}; 1 is right")
sys.exit(wrong > 0)
