"""The eager attention that model libraries run: products in the storage dtype, softmax in fp32.

    scores = (q k^T) * scale        each product of torch rounds its result into the storage dtype
    p = softmax(scores in fp32), rounded into the storage dtype
    o = p v, rounded into the storage dtype

The backward is autograd's, step by step: dP = dO v^T is rounded into the storage dtype; the softmax's
derivative in fp32, of the unrounded p and that dP, is rounded into it; times the scale, rounded again; then
come the products with k and q. Grouped heads are repeated, so dK and dV are rounded per query head.

As in transformers' ``eager_attention_forward`` (models/llama/modeling_llama.py, the common pattern). On CUDA
products are asked for without partial sums in 16 bits, which torch allows by default (``torch_products``).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from flashcheck.adapters.grouped_heads import expanded_heads
from flashcheck.adapters.sdpa_masks import additive_mask
from flashcheck.adapters.torch_products import sums_in_fp32
from flashcheck.arithmetic import Arithmetic, flash
from flashcheck.kernel import Capabilities, ForwardResult, Kernel
from flashcheck.problem import Problem

CAPABILITIES = Capabilities(
    dtypes=("fp16", "bf16", "fp32"),
    options=("scale", "causal", "mask"),
    causal=("top_left",),
    value_dim_differs=True,
    gqa=True,
    lse=False,
    empty_rows=False,  # softmax over nothing but -inf is NaN
    zero_length=False,
    isolates_nonfinite=False,  # hidden keys are multiplied by a probability of zero: NaN * 0
)


def eager_kernel() -> Kernel:
    """``eager``: what a model runs when no fused kernel is chosen."""
    return Kernel(
        name="eager",
        forward=_forward,
        backward=_backward,
        capabilities=CAPABILITIES,
        arithmetic=eager_arithmetic,
        source=f"torch {torch.__version__} matmul, softmax",
    )


def eager_arithmetic(problem: Problem) -> Arithmetic:
    """The scores are rounded twice into the storage dtype: as a product, and after the scale."""
    fmt = problem.format
    return flash(
        fmt,
        normalise="before_product",
        scale_placement="scores",
        scale_roundings=1,
        score_format=fmt,
        scaled_score_format=fmt,
        grad_probability_format=fmt,
        scaled_grad_score_format=fmt,
        group_grad_format=fmt,
    )


@sums_in_fp32()
def _forward(problem: Problem) -> ForwardResult:
    with torch.no_grad():
        return ForwardResult(_attention(problem))


@sums_in_fp32()
def _backward(problem: Problem, out: Tensor, lse: Tensor) -> Mapping[str, Tensor]:
    """Autograd; it keeps P itself and uses neither ``out`` nor ``lse``."""
    del out, lse
    leaves = {name: getattr(problem, name).detach().clone().requires_grad_() for name in ("q", "k", "v")}
    result = _attention(problem.replaced(**leaves))
    gradients = torch.autograd.grad(result, list(leaves.values()), problem.dout)
    return dict(zip(("dq", "dk", "dv"), gradients, strict=True))


def _attention(p: Problem) -> Tensor:
    k, v = expanded_heads(p)
    scores = torch.matmul(p.q, k.transpose(2, 3)) * p.effective_scale
    mask = additive_mask(p, fold_causal=True)
    if mask is not None:
        scores = scores + mask.to(scores.dtype)
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(p.q.dtype)
    return torch.matmul(weights, v)
