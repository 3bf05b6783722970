"""xformers' ``memory_efficient_attention``, with its flash and with its CUTLASS operator; CUDA only.

Called through the two functions that its documentation names for a backward apart from automatic
differentiation (``..._forward_requires_grad`` and ``..._backward``), with the operator given, so that the
arithmetic is known. Tensors are (batch, length, heads, dim); key/value heads are repeated by the adapter.
Read from facebookresearch/xformers at bed3978 (xformers/ops/fmha; later ones re-export the same from mslk):

flash
    flash-attn 2, bundled or installed: its arithmetic. Causality from the bottom right.
cutlass
    Scores are multiplied by the constant first (torch's memory-efficient back end is the same kernel).
    Causality from either corner; the LSE's rows are padded to a multiple of 32. Forward alone: where its
    backward rounds is not known well enough to declare it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from flashcheck.adapters.flash_attn import two_arithmetic
from flashcheck.adapters.grouped_heads import expanded_heads, summed_group
from flashcheck.adapters.optional import required, version_of
from flashcheck.adapters.torch_sdpa_cuda import FLASH_CAPABILITIES
from flashcheck.arithmetic import Arithmetic, flash
from flashcheck.kernel import Capabilities, ForwardResult, Kernel
from flashcheck.problem import Problem

_INSTALL = "pip install xformers"

CUTLASS_CAPABILITIES = replace(
    FLASH_CAPABILITIES, causal=("top_left", "bottom_right"), value_dim_differs=True
)


def flash_kernel() -> Kernel:
    """``xformers.flash``."""
    return _kernel("flash", "MemoryEfficientAttentionFlashAttentionOp", FLASH_CAPABILITIES, two_arithmetic)


def cutlass_kernel() -> Kernel:
    """``xformers.cutlass``."""
    name = "MemoryEfficientAttentionCutlassOp"
    return _kernel("cutlass", name, CUTLASS_CAPABILITIES, cutlass_arithmetic, backward=False)


def cutlass_arithmetic(problem: Problem) -> Arithmetic:
    """What the CUTLASS operator does with this problem."""
    return flash(problem.format, scale_roundings=2, scale_placement="scores")


def _kernel(
    operator: str,
    attribute: str,
    capabilities: Capabilities,
    arithmetic: Callable[[Problem], Arithmetic],
    *,
    backward: bool = True,
) -> Kernel:
    name = f"xformers.{operator}"
    names = (
        "memory_efficient_attention_forward_requires_grad",
        "memory_efficient_attention_backward",
        "LowerTriangularMask",
        attribute,
    )
    run, differentiate, top_left, operators = required(name, "xformers.ops", names, _INSTALL)
    (bottom_right,) = required(
        name, "xformers.ops.fmha.attn_bias", ("LowerTriangularFromBottomRightMask",), _INSTALL
    )
    masks = {None: lambda: None, "top_left": top_left, "bottom_right": bottom_right}

    def forward(problem: Problem) -> ForwardResult:
        out, lse = run(
            *_inputs(problem),
            attn_bias=masks[problem.causal](),
            scale=problem.effective_scale,
            op=operators[0],
        )
        return ForwardResult(out.transpose(1, 2), lse[..., : problem.num_queries])

    def gradients(problem: Problem, out: Tensor, lse: Tensor) -> Mapping[str, Tensor]:
        assert problem.dout is not None
        dq, dk, dv = (
            x.transpose(1, 2)
            for x in differentiate(
                problem.dout.transpose(1, 2),
                out.transpose(1, 2),
                lse,
                *_inputs(problem),
                attn_bias=masks[problem.causal](),
                scale=problem.effective_scale,
                op=operators[1],
            )
        )
        return {"dq": dq, "dk": summed_group(dk, problem.group), "dv": summed_group(dv, problem.group)}

    return Kernel(
        name=name,
        forward=forward,
        backward=gradients if backward else None,
        capabilities=capabilities,
        arithmetic=arithmetic,
        source=f"xformers {version_of('xformers')} memory_efficient_attention, {attribute}",
    )


def _inputs(problem: Problem) -> tuple[Any, ...]:
    k, v = expanded_heads(problem)
    return tuple(x.transpose(1, 2) for x in (problem.q, k, v))
