"""torch's ``scaled_dot_product_attention`` on CUDA: FlashAttention-2, memory-efficient, cuDNN, math.

Each but the last is called through its operator, which returns the LSE and takes a stored O and LSE in its
backward.
Read from torch (aten/src/ATen/native/transformers/cuda) and flash-attention (csrc/flash_attn/src):

flash
    Scale and log2 e are one fp32 constant (two roundings), fused with the subtraction of the maximum.
    Causality counts from the bottom right. LSE of an empty row is +inf. dQ is summed by atomics. fp32
    numbers below 2^-126 are flushed to 0.
efficient
    Scores are multiplied by that constant first. Causality counts from the top left. The LSE's rows are
    padded to a multiple of 32. Forward alone: its backward rounds more often than the usual arithmetic
    (dK up to twice the bound), and where, its declaration would have to say.
cudnn
    Closed source: a flash attention of the usual arithmetic, tiles unknown. Forward alone: its backward
    operator ended the process when it was given a stored O and LSE.
math
    The same steps as on the CPU (``torch_sdpa``); products are fp32, as TF32 is off by default.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from flashcheck.adapters import torch_sdpa
from flashcheck.adapters.grouped_heads import expanded_heads, summed_group
from flashcheck.arithmetic import Arithmetic, flash
from flashcheck.kernel import Capabilities, ForwardResult, Kernel
from flashcheck.problem import Problem

FLASH_CAPABILITIES = Capabilities(
    dtypes=("fp16", "bf16"),
    options=("scale", "causal"),
    causal=("bottom_right",),
    head_dim=(8, 256),
    head_dim_multiple=8,
    value_dim_differs=False,
    gqa=True,
    lse=True,
    empty_rows=False,
    zero_length=False,
    any_strides=False,
    isolates_nonfinite=False,
    deterministic=False,
    devices=("cuda",),
    # A scale of 0 gives NaN (hidden scores are -inf before they are multiplied), and the running maximum is
    # taken of the products before they are scaled: golden/findings/001.
    nonpositive_scale=False,
)
EFFICIENT_CAPABILITIES = replace(FLASH_CAPABILITIES, causal=("top_left",))
CUDNN_CAPABILITIES = replace(FLASH_CAPABILITIES, causal=("top_left",), head_dim=(8, 128))


def flash_kernel() -> Kernel:
    """``torch.sdpa.cuda.flash``."""
    return _kernel("flash", FLASH_CAPABILITIES, _flash_arithmetic, _flash_call, _flash_backward)


def efficient_kernel() -> Kernel:
    """``torch.sdpa.cuda.efficient``."""
    return _kernel("efficient", EFFICIENT_CAPABILITIES, _efficient_arithmetic, _efficient_call)


def cudnn_kernel() -> Kernel:
    """``torch.sdpa.cuda.cudnn``."""
    return _kernel("cudnn", CUDNN_CAPABILITIES, _flash_arithmetic, _cudnn_call)


def math_kernel() -> Kernel:
    """``torch.sdpa.cuda.math``."""
    there = torch_sdpa.math_kernel()
    capabilities = replace(there.capabilities, devices=("cuda",))
    return replace(there, name="torch.sdpa.cuda.math", capabilities=capabilities)


Call = Callable[[Problem, Tensor, Tensor], tuple[Any, ...]]
Gradients = Callable[[Problem, Tensor, Tensor, Tensor, Tensor, tuple[Any, ...]], tuple[Any, ...]]


def _kernel(
    back_end: str,
    capabilities: Capabilities,
    arithmetic: Callable[[Problem], Arithmetic],
    call: Call,
    gradients: Gradients | None = None,
) -> Kernel:
    def forward(problem: Problem) -> ForwardResult:
        out, lse = call(problem, *expanded_heads(problem))[:2]
        return ForwardResult(out, _rows(lse, problem))

    def backward(problem: Problem, out: Tensor, lse: Tensor) -> Mapping[str, Tensor]:
        k, v = expanded_heads(problem)
        raw = call(problem, k, v)
        # The back ends compute some strides of O instead of reading them: it must lie as they made it.
        assert gradients is not None
        stored = torch.empty_like(raw[0]).copy_(out)
        dq, dk, dv = gradients(problem, k, v, stored, lse, raw)[:3]
        return {"dq": dq, "dk": summed_group(dk, problem.group), "dv": summed_group(dv, problem.group)}

    return Kernel(
        name=f"torch.sdpa.cuda.{back_end}",
        forward=forward,
        backward=None if gradients is None else backward,
        capabilities=capabilities,
        arithmetic=arithmetic,
        source=f"torch {torch.__version__} aten::_scaled_dot_product_{back_end}_attention",
    )


def _flash_arithmetic(problem: Problem) -> Arithmetic:
    # Subnormal fp32 numbers are flushed in both: golden/findings/002.
    return flash(
        problem.format,
        scale_roundings=2,
        atomic_dq=True,
        group_grad_format=problem.format,
        flush_subnormals=True,
    )


def _efficient_arithmetic(problem: Problem) -> Arithmetic:
    return replace(_flash_arithmetic(problem), scale_placement="scores", flush_subnormals=False)


def _flash_call(p: Problem, k: Tensor, v: Tensor) -> tuple[Any, ...]:
    op = torch.ops.aten._scaled_dot_product_flash_attention
    result: tuple[Any, ...] = op(p.q, k, v, 0.0, p.causal is not None, False, scale=p.effective_scale)
    return result


def _flash_backward(
    p: Problem, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, raw: tuple[Any, ...]
) -> tuple[Any, ...]:
    _, _, cum_q, cum_k, max_q, max_k, seed, offset, _ = raw
    op = torch.ops.aten._scaled_dot_product_flash_attention_backward
    sizes = (cum_q, cum_k, max_q, max_k, 0.0, p.causal is not None, seed, offset)
    result: tuple[Any, ...] = op(p.dout, p.q, k, v, out, lse, *sizes, scale=p.effective_scale)
    return result


def _efficient_call(p: Problem, k: Tensor, v: Tensor) -> tuple[Any, ...]:
    op = torch.ops.aten._scaled_dot_product_efficient_attention
    result: tuple[Any, ...] = op(p.q, k, v, None, True, 0.0, p.causal is not None, scale=p.effective_scale)
    return result


def _cudnn_call(p: Problem, k: Tensor, v: Tensor) -> tuple[Any, ...]:
    op = torch.ops.aten._scaled_dot_product_cudnn_attention
    causal = p.causal is not None
    result: tuple[Any, ...] = op(p.q, k, v, None, True, 0.0, causal, False, scale=p.effective_scale)
    return result


def _rows(lse: Tensor, problem: Problem) -> Tensor:
    """(batch, heads, Nq) of an LSE that may have padded rows or a last axis of one."""
    shape = (problem.batch, problem.num_heads, problem.num_queries)
    return lse.reshape(*shape[:2], -1)[..., : problem.num_queries]
