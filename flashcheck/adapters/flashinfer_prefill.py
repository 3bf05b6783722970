"""FlashInfer's ``single_prefill_with_kv_cache``, FlashAttention-2 back end; CUDA, forward only.

One call per batch entry (per head where a mask differs between heads): tensors are (length, heads, dim).
Read from flashinfer-ai/flashinfer at fb28d72 (flashinfer/prefill.py, include/flashinfer/attention): scale
and log2 e are one fp32 constant (two roundings), or the cap and log2 e where there is a cap; tiles go by
head dim and GPU and are not declared. Causality counts from the bottom right and gives way to a custom
mask, so the adapter writes it into one. **The LSE is in base 2**, which its docstring does not say; the
adapter multiplies by ln 2.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from flashcheck.adapters.optional import required, version_of
from flashcheck.arithmetic import Arithmetic, flash
from flashcheck.kernel import Capabilities, ForwardResult, Kernel
from flashcheck.problem import Problem

CAPABILITIES = Capabilities(
    dtypes=("fp16", "bf16"),
    options=("scale", "causal", "mask", "softcap"),
    causal=("bottom_right",),
    head_dim=(64, 256),
    head_dim_multiple=64,
    gqa=True,
    lse=True,
    empty_rows=False,
    any_strides=False,
    isolates_nonfinite=False,
    deterministic=False,
    devices=("cuda",),
    nonpositive_scale=False,  # hidden scores are -inf before they are scaled
)


def single_prefill_kernel() -> Kernel:
    """``flashinfer.single_prefill``."""
    name = "flashinfer.single_prefill"
    (function,) = required(
        name, "flashinfer", ("single_prefill_with_kv_cache",), "pip install flashinfer-python"
    )
    return Kernel(
        name=name,
        forward=lambda problem: _forward(function, problem),
        capabilities=CAPABILITIES,
        arithmetic=arithmetic,
        source=f"flashinfer {version_of('flashinfer')} single_prefill_with_kv_cache, backend fa2",
    )


def arithmetic(problem: Problem) -> Arithmetic:
    """What the kernel does with this problem."""
    return flash(problem.format, scale_roundings=2)


def _forward(function: Any, problem: Problem) -> ForwardResult:
    p = problem
    mask = _mask(p)
    apart = mask is not None and mask.shape[1] > 1
    step = 1 if apart else p.num_heads
    out = p.q.new_empty(p.batch, p.num_heads, p.num_queries, p.value_dim)
    lse = p.q.new_empty(p.batch, p.num_heads, p.num_queries, dtype=torch.float32)
    for b in range(p.batch):
        for first in range(0, p.num_heads, step):
            heads = slice(first, first + step)
            kv = slice(first // p.group, first // p.group + 1) if apart else slice(None)
            shown = None if mask is None else mask[b, first if apart else 0]
            o, base_two = function(
                *(x.transpose(0, 1) for x in (p.q[b, heads], p.k[b, kv], p.v[b, kv])),
                custom_mask=shown,
                causal=p.causal is not None and shown is None,
                kv_layout="NHD",
                sm_scale=p.effective_scale,
                logits_soft_cap=p.softcap,
                backend="fa2",
                return_lse=True,
            )
            out[b, heads] = o.transpose(0, 1)
            lse[b, heads] = (base_two.double() * math.log(2)).float().transpose(0, 1)
    return ForwardResult(out, lse)


def _mask(p: Problem) -> Tensor | None:
    """(batch, heads or 1, Nq, Nk), causality included; None where there is no mask but causality."""
    if p.mask is None:
        return None
    mask = p.mask.expand(p.batch, p.mask.shape[1], p.num_queries, p.num_keys)
    if p.causal is not None:
        i, j = (torch.arange(n, device=p.q.device) for n in (p.num_queries, p.num_keys))
        mask = mask & (j <= i.unsqueeze(-1) + (p.num_keys - p.num_queries))
    return mask
