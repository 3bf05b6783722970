"""Attention and its gradients by the eager formula in float64, (batch, heads, length, dim): what stand-ins of
libraries compute. Windows and causality count from the bottom right, as flash-attn documents."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Options:
    scale: float
    causal: bool = False
    left: int | None = None
    right: int | None = None
    mask: Tensor | None = None  # (Nq, Nk), True: visible
    cap: float = 0.0
    slopes: Tensor | None = None  # (heads,) or (batch, heads)
    sink: Tensor | None = None
    top_left: bool = False

    def visible(self, nq: int, nk: int) -> Tensor:
        i, j = torch.arange(nq).unsqueeze(-1), torch.arange(nk)
        aligned = i if self.top_left else i + nk - nq
        seen = torch.ones(nq, nk, dtype=torch.bool) if self.mask is None else self.mask.clone()
        if self.causal:
            seen &= j <= aligned
        if self.left is not None:
            seen &= j >= aligned - self.left
        if self.right is not None:
            seen &= j <= aligned + self.right
        return seen

    def scores(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Scores, -inf where hidden, and the derivative of the cap."""
        nq, nk = q.shape[2], k.shape[2]
        s = self.scale * (q @ k.mT)
        slope = torch.ones_like(s)
        if self.cap > 0:
            t = torch.tanh(s / self.cap)
            s, slope = self.cap * t, 1 - t * t
        if self.slopes is not None:
            slopes = self.slopes.double().reshape(-1, q.shape[1])[..., None, None]
            i, j = torch.arange(nq).unsqueeze(-1), torch.arange(nk)
            s = s - slopes * (i + nk - nq - j).abs()
        return s.masked_fill(~self.visible(nq, nk), -torch.inf), slope


def repeated(x: Tensor, heads: int) -> Tensor:
    return x.double().repeat_interleave(heads // x.shape[1], 1)


def forward(q: Tensor, k: Tensor, v: Tensor, options: Options) -> tuple[Tensor, Tensor]:
    """O in q's dtype and LSE in fp32, -inf (the sink's logit where there is one) for an empty row."""
    heads = q.shape[1]
    s, _ = options.scores(q.double(), repeated(k, heads))
    lse = s.logsumexp(-1) if s.shape[-1] else s.new_full(s.shape[:-1], -torch.inf)
    if options.sink is not None:
        lse = torch.logaddexp(lse, options.sink.double()[:, None].expand_as(lse))
    p = torch.where(lse.isneginf().unsqueeze(-1), 0.0, (s - lse.unsqueeze(-1)).exp())
    return (p @ repeated(v, heads)).to(q.dtype), lse.float()


def backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    options: Options,
    dlse: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dq, dk, dv in q's dtype and dsink (heads,), of the O and LSE given.

    P and dS are rounded into q's dtype before the products, as every 16-bit kernel does.
    """
    heads, group = q.shape[1], q.shape[1] // k.shape[1]
    q_, dout_, lse_ = q.double(), dout.double(), lse.double()
    k_, v_ = repeated(k, heads), repeated(v, heads)
    s, slope = options.scores(q_, k_)
    p = torch.where(lse_.isneginf().unsqueeze(-1), 0.0, (s - lse_.unsqueeze(-1)).exp())
    p = torch.where(s.isneginf(), 0.0, p)
    delta = (dout_ * out.double()).sum(-1) - (0.0 if dlse is None else dlse.double())
    ds = (p * (dout_ @ v_.mT - delta.unsqueeze(-1)) * slope).to(q.dtype).double() * options.scale
    per_head = (ds.mT @ q_, p.to(q.dtype).double().mT @ dout_)
    dk, dv = (x.unflatten(1, (-1, group)).sum(2).to(q.dtype) for x in per_head)
    dsink = torch.zeros(heads, dtype=torch.float64)
    if options.sink is not None:
        seen = options.visible(*s.shape[-2:]).any(-1)
        share = (options.sink.double()[:, None] - lse_).exp()
        dsink = -torch.where(seen, share * delta, 0.0).sum((0, 2))
    return (ds @ k_).to(q.dtype), dk, dv, dsink
