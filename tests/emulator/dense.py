"""Attention in float64 straight from the definition, and small problems."""

from __future__ import annotations

import torch
from torch import Tensor

from flashcheck.formats import Format, round_nearest
from flashcheck.problem import Problem


def dense(p: Problem) -> tuple[Tensor, Tensor]:
    """(out, lse) of a problem without infinities, float64."""
    k, v = (x.double().repeat_interleave(p.group, 1) for x in (p.k, p.v))
    s = p.q.double() @ k.mT * p.effective_scale
    if p.softcap is not None:
        s = p.softcap * torch.tanh(s / p.softcap)
    for added in (p.bias, p.alibi()):
        s = s if added is None else s + added.double()
    s = s.masked_fill(~p.visible(), -torch.inf)
    if p.sink is not None:
        s = torch.cat([s, p.sink.double().view(1, -1, 1, 1).expand(*s.shape[:3], 1)], -1)
    lse = torch.logsumexp(s, -1)
    weights = torch.exp(s - lse[..., None]).nan_to_num(0.0)[..., : p.num_keys]
    return weights @ v * p.v_descale, lse


def small_problem(fmt: Format, seed: int = 0, num_keys: int = 150, **options: object) -> Problem:
    g = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return round_nearest(torch.randn(shape, generator=g, dtype=torch.float64), fmt).to(fmt.dtype)

    return Problem(
        draw(2, 4, 21, 16),
        draw(2, 2, num_keys, 16),
        draw(2, 2, num_keys, 8),
        **options,  # type: ignore[arg-type]
    )


def options_named(name: str) -> dict[str, object]:
    """Options for ``small_problem``, by a name that lists them."""
    g = torch.Generator().manual_seed(1)
    table: dict[str, object] = {
        "causal": "bottom_right",
        "window": (9, 3),
        "mask": torch.rand(2, 1, 21, 150, generator=g) > 0.6,
        "bias": torch.randn(1, 4, 1, 150, generator=g),
        "alibi_slopes": torch.rand(4, generator=g),
        "softcap": 2.0,
        "sink": torch.randn(4, generator=g) * 3,
        "key_lengths": torch.tensor([0, 75]),
        "negative": -0.7,
        "zero": 0.0,
        "packed": None,
    }
    out: dict[str, object] = {}
    for word in name.split():
        out["scale" if word in ("negative", "zero") else word] = table[word]
    return out
