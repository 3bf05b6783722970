"""Problems on which a fault shows: small, deterministic, one per situation."""

from __future__ import annotations

import torch
from torch import Tensor

from flashcheck.formats import BF16, Format, round_nearest
from flashcheck.problem import Problem


def draw(
    fmt: Format = BF16,
    *,
    batch: int = 1,
    heads: tuple[int, int] = (2, 2),
    lengths: tuple[int, int] = (37, 53),
    dims: tuple[int, int] = (16, 16),
    seed: int = 0,
    **options: object,
) -> Problem:
    """Unit Gaussians; heads are (query, key/value), lengths (Nq, Nk), dims (q and k, v)."""
    g = torch.Generator().manual_seed(seed)

    def tensor(heads: int, length: int, dim: int) -> Tensor:
        x = torch.randn(batch, heads, length, dim, generator=g, dtype=torch.float64)
        return round_nearest(x, fmt).to(fmt.dtype)

    (hq, hkv), (nq, nk), (d, dv) = heads, lengths, dims
    q, k, v = tensor(hq, nq, d), tensor(hkv, nk, d), tensor(hkv, nk, dv)
    return Problem(q, k, v, **options)  # type: ignore[arg-type]


def shifted(by: float, **options: object) -> Problem:
    """All scores moved by about ``by``: q and k carry one more dim, of 1 and of ``by``; integers, scale 1."""
    p = draw(**options)  # type: ignore[arg-type]
    q, k = torch.round(p.q.float()), torch.round(p.k.float())
    q[..., -1], k[..., -1] = 1.0, by
    return p.replaced(q=q.to(p.q.dtype), k=k.to(p.k.dtype), scale=1.0)


def increasing(**options: object) -> Problem:
    """Scores that grow along the keys, so that the maximum moves in every tile."""
    p = draw(**options)  # type: ignore[arg-type]
    q, k = p.q.float().clone(), p.k.float().clone()
    q[..., 0], k[..., 0] = 4.0, torch.arange(p.num_keys).float() / 4
    return p.replaced(q=q.to(p.q.dtype), k=k.to(p.k.dtype), scale=0.25)


def equal_scores(num_keys: int, value: float, **options: object) -> Problem:
    """All keys weigh the same and all values are ``value``: the output is ``value``."""
    p = draw(lengths=(3, num_keys), **options)  # type: ignore[arg-type]
    return p.replaced(q=torch.zeros_like(p.q), v=torch.full_like(p.v, value))


def with_buffer_tail(p: Problem, fill: float) -> Problem:
    """The values as a view whose storage goes on, with ``fill``, past the last row of every head."""
    v = p.v
    buffer = torch.full((v.shape[0], v.shape[1], v.shape[2] + 16, v.shape[3]), fill, dtype=v.dtype)
    buffer[:, :, : v.shape[2]] = v
    return p.replaced(v=buffer[:, :, : v.shape[2]])


def random_mask(p: Problem, heads: int = 1, seed: int = 7) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    return torch.rand(p.batch, heads, p.num_queries, p.num_keys, generator=g) > 0.5


def random_bias(p: Problem, heads: int = 1, rows: int = 1, seed: int = 8) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(1, heads, rows, p.num_keys, generator=g)


def masked(heads: int = 1, **options: object) -> Problem:
    p = draw(**options)  # type: ignore[arg-type]
    return p.replaced(mask=random_mask(p, heads))


def biased(heads: int = 1, rows: int = 1, **options: object) -> Problem:
    p = draw(**options)  # type: ignore[arg-type]
    return p.replaced(bias=random_bias(p, heads, rows))


def sloped(**options: object) -> Problem:
    p = draw(heads=(4, 4), **options)  # type: ignore[arg-type]
    return p.replaced(alibi_slopes=torch.tensor([0.5, 0.25, 0.125, 0.0625]))


def with_sink(logits: tuple[float, ...], **options: object) -> Problem:
    p = draw(heads=(len(logits), len(logits)), **options)  # type: ignore[arg-type]
    return p.replaced(sink=torch.tensor(logits))


def packed(**options: object) -> Problem:
    p = draw(lengths=(40, 40), **options)  # type: ignore[arg-type]
    ends = torch.tensor([0, 11, 11, 29, 40])
    return p.replaced(cu_seqlens_q=ends, cu_seqlens_k=ends)


def one_nan(**options: object) -> Problem:
    """NaN in one key that all rows see."""
    p = draw(**options)  # type: ignore[arg-type]
    k = p.k.clone()
    k[0, 0, 5, 3] = torch.nan
    return p.replaced(k=k)


def overflowing() -> Problem:
    """One key's score past fp32's largest number, finite inputs; all other scores are 0."""
    p = draw()
    q, k = torch.full_like(p.q, 3e38), torch.zeros_like(p.k)
    k[:, :, 5] = 3e38
    return p.replaced(q=q, k=k)
