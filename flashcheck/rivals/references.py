"""What the rules compare with: the exact result, and eager attention with every operation rounded."""

from __future__ import annotations

import torch
from torch import Tensor

from flashcheck.oracle import fp64
from flashcheck.problem import Problem

Results = dict[str, Tensor]
"""O, LSE, dQ, dK, dV in float64."""


def exact(problem: Problem) -> Results:
    """From float64 and from scratch; ``problem`` has a dout."""
    forward, backward = fp64.forward(problem), fp64.backward(problem)
    return {
        "O": forward.out,
        "LSE": forward.lse,
        "dQ": backward.dq,
        "dK": backward.dk,
        "dV": backward.dv,
    }


def eager_in_dtype(problem: Problem) -> Results:
    """The twin that many suites call ``pt``: eager attention in the kernel's dtype, k scaled first, every
    operation's result rounded, gradients by autograd."""
    p = problem
    assert p.dout is not None
    dtype = p.q.dtype
    q, k, v = (x.detach().clone().requires_grad_() for x in (p.q, p.k, p.v))
    wide_k, wide_v = (x.repeat_interleave(p.group, 1) for x in (k, v))
    scores = q @ (wide_k * p.effective_scale).mT
    if p.softcap is not None:
        scores = p.softcap * torch.tanh(scores / p.softcap)
    if p.bias is not None:
        scores = scores + p.bias.to(dtype)
    if (alibi := p.alibi()) is not None:
        scores = scores + alibi.to(dtype)
    scores = scores.masked_fill(~p.visible(), -torch.inf)
    logits = scores
    if p.sink is not None:
        column = p.sink.view(1, -1, 1, 1).expand(p.batch, -1, p.num_queries, 1).to(dtype)
        logits = torch.cat([scores, column], -1)
    weights = torch.softmax(logits.float(), -1).nan_to_num(0.0).to(dtype)[..., : p.num_keys]
    out = weights @ wide_v
    dq, dk, dv = torch.autograd.grad(out, (q, k, v), p.dout)
    lse = torch.logsumexp(logits.double(), -1)
    named = {"O": out, "LSE": lse, "dQ": dq, "dK": dk, "dV": dv}
    return {name: x.detach().double() for name, x in named.items()}
