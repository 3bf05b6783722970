"""Batch invariance of back ends: does a sequence get the same bits alone as in a batch?

He et al. 2025 ("Defeating Nondeterminism in LLM Inference", Thinking Machines Lab) name kernels that lack it
as why a model's answers change with the load of its server. Measured for what runs on this machine: prefill
(as many queries as keys), a chunk of 8 queries, decoding (one query).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from flashcheck.kernel import Kernel
from flashcheck.problem import Problem

BATCH = 4
NUM_KEYS = 96
HEADS = 2
HEAD_DIM = 64
QUERIES = {"prefill": NUM_KEYS, "chunk": 8, "decode": 1}


@dataclass(frozen=True)
class Invariance:
    """Elements of O that change when a sequence is computed alone, of how many."""

    changed: int
    elements: int


def invariance(kernel: Kernel, num_queries: int, dtype: torch.dtype, seed: int = 0) -> Invariance:
    generator = torch.Generator().manual_seed(seed)
    lengths = (num_queries, NUM_KEYS, NUM_KEYS)
    q, k, v = (torch.randn((BATCH, HEADS, n, HEAD_DIM), generator=generator).to(dtype) for n in lengths)
    together = kernel.forward(Problem(q, k, v)).out
    alone = [kernel.forward(Problem(q[b : b + 1], k[b : b + 1], v[b : b + 1])).out for b in range(BATCH)]
    changed = int((together != torch.cat(alone)).sum())
    return Invariance(changed, together.numel())
