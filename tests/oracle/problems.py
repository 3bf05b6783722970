"""Small random problems over every option, for comparing oracles with one another."""

from __future__ import annotations

import random

import torch
from torch import Tensor

from flashcheck.problem import Problem

DTYPES = (
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
)


def random_problem(seed: int, max_length: int = 7, max_dim: int = 4, spread: float = 1.0) -> Problem:
    """A problem drawn from ``seed``: shapes, dtype, each option present about every third time.

    Lengths start at 0; ``spread`` multiplies q, and so the logits.
    """
    rng = random.Random(seed)
    gen = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=gen, dtype=torch.float64)

    def sometimes() -> bool:
        return rng.random() < 0.35

    batch, kv_heads, group = rng.randint(1, 2), rng.randint(1, 2), rng.randint(1, 3)
    nq, nk = rng.randint(0, max_length), rng.randint(0, max_length)
    dim, value_dim = rng.randint(1, max_dim), rng.randint(1, max_dim)
    heads = kv_heads * group
    full = (batch, heads, nq, nk)
    packed = batch == 1 and sometimes()
    dtype = rng.choice(DTYPES)

    def broadcastable() -> tuple[int, ...]:
        return tuple(rng.choice((1, n)) for n in full)

    def ends(total: int) -> Tensor:
        cuts = sorted(rng.randint(0, total) for _ in range(2))
        return torch.tensor([0, *cuts, total])

    return Problem(
        q=(spread * normal(batch, heads, nq, dim)).to(dtype),
        k=normal(batch, kv_heads, nk, dim).to(dtype),
        v=normal(batch, kv_heads, nk, value_dim).to(dtype),
        scale=rng.choice([None, 0.7, -0.4, 0.0, 3.0]),
        causal=rng.choice([None, None, "top_left", "bottom_right"]),
        window=(rng.choice([None, 0, 2]), rng.choice([None, 1])) if sometimes() else None,
        mask=torch.rand(broadcastable(), generator=gen) < 0.7 if sometimes() else None,
        bias=normal(*broadcastable()) if sometimes() else None,
        alibi_slopes=normal(*rng.choice([(heads,), (batch, heads)])).abs() if sometimes() else None,
        softcap=rng.choice([0.5, 3.0, 20.0]) if sometimes() else None,
        sink=normal(heads) if sometimes() else None,
        key_lengths=torch.tensor([rng.randint(0, nk) for _ in range(batch)]) if sometimes() else None,
        cu_seqlens_q=ends(nq) if packed else None,
        cu_seqlens_k=ends(nk) if packed else None,
        q_descale=rng.choice([1.0, 1.0, 0.3]),
        k_descale=rng.choice([1.0, 1.0, 1.7]),
        v_descale=rng.choice([1.0, 1.0, 0.6]),
        dout=normal(batch, heads, nq, value_dim),
        dlse=normal(batch, heads, nq) if sometimes() else None,
        seed=seed,
    )
