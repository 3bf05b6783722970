"""What the launches of a sweep are judged against: attention in fp64 or fp32 by torch, on the same device."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.bench.calls import FP8_DTYPE, Tensors
from kernels.bench.candidates import OTHERS

# Largest accepted error as a fraction: of norms, and of the largest element. A wrong tile is far outside
# both; the proper judgement of accuracy is the checker's.
NORM, ELEMENT = 1e-2, 3e-2
_FP8_MORE = 2.0**-4  # on top with fp8: half a unit of e4m3, by which every probability may be off


def expected(
    q: Tensor, k: Tensor, v: Tensor, dout: Tensor, causal: bool, dtype: torch.dtype
) -> dict[str, Tensor]:
    """out, lse, dq, dk, dv, delta in ``dtype``; causal is bottom right."""
    leaves = [x.detach().to(dtype).requires_grad_() for x in (q, k, v)]
    group = q.shape[1] // k.shape[1]
    wide_k, wide_v = (x.repeat_interleave(group, 1) for x in leaves[1:])
    scores = leaves[0] @ wide_k.mT * q.shape[3] ** -0.5
    if causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device)
        scores = scores.masked_fill(hidden.triu(1 + scores.shape[-1] - scores.shape[-2]), -torch.inf)
    lse = scores.logsumexp(-1)
    out = (scores - lse[..., None]).exp() @ wide_v
    upstream = dout.to(dtype)
    gradients = torch.autograd.grad(out, leaves, upstream)
    out, lse = out.detach(), lse.detach()
    names = dict(zip(("dq", "dk", "dv"), gradients, strict=True))
    return {"out": out, "lse": lse, "delta": (out * upstream).sum(-1), **names}


def problem(
    shape: tuple[int, int, int, int, int, int],
    causal: bool,
    device: str,
    dtype: torch.dtype,
    fp8: bool = False,
) -> tuple[Tensors, dict[str, Tensor]]:
    """bf16 tensors of (batch, heads, kv heads, Nq, Nk, dim), and what is expected of them.

    ``fp8``: the numbers are such as e4m3 holds.
    """
    batch, heads, kv_heads, num_queries, num_keys, dim = shape
    generator = torch.Generator(device).manual_seed(1)

    def draw(count: int, length: int) -> Tensor:
        x = torch.randn((batch, count, length, dim), generator=generator, device=device, dtype=torch.float32)
        return (x.to(FP8_DTYPE) if fp8 else x).bfloat16()

    q, dout = draw(heads, num_queries), draw(heads, num_queries)
    k, v = draw(kv_heads, num_keys), draw(kv_heads, num_keys)
    exact = expected(q, k, v, dout, causal, dtype)
    lse, delta = exact["lse"].float(), exact["delta"].float()
    return (dout, q, k, v, lse, delta), exact


RESULTS = {
    **dict.fromkeys(("forward", *OTHERS), ("out", "lse")),
    "dkdv": ("dk", "dv"),
    "dq": ("dq",),
    "dk": ("dk",),
    "dv": ("dv",),
}


def worst_error(kernel: str, got: tuple[Tensor, ...], exact: dict[str, Tensor]) -> float:
    """The largest error as a fraction of what is accepted; NaN counts as infinite."""
    more = _FP8_MORE if "fp8" in kernel else 0.0
    worst = 0.0
    for name, value in zip(RESULTS[kernel], got, strict=True):
        error = value.to(exact[name].dtype) - exact[name]
        by_norm = float(error.norm() / exact[name].norm()) / (NORM + more)
        by_element = float(error.abs().max() / exact[name].abs().max()) / (ELEMENT + more)
        found = max(by_norm, by_element)
        worst = max(worst, found) if found == found else float("inf")  # noqa: PLR0124
    return worst
