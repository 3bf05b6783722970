"""torch's ``scaled_dot_product_attention`` on CUDA: FlashAttention-2, memory-efficient, cuDNN, math.

Each but the last is called through its operator, which returns the LSE; the gradients are taken at the O and
LSE that are given.
Read from torch (aten/src/ATen/native/transformers/cuda) and flash-attention (csrc/flash_attn/src):

flash
    Scale and log2 e are one fp32 constant (two roundings). torch builds it with UNFUSE_FMA: the score times
    that constant is rounded before the maximum is subtracted. Causality counts from the bottom right. LSE of
    an empty row is +inf. Few heads and more than one tile of keys: the keys are split and the parts merged by
    their fp32 LSEs (golden/findings/011). dQ is summed by atomics. fp32 numbers below 2^-126 are flushed to 0
    (golden/findings/002).
efficient
    Scores are multiplied by that constant first. Causality counts from the top left. The LSE's rows are
    padded to a multiple of 32. The backward keeps P in shared memory in the input format and takes dS of
    that; dS is scaled in fp32 and rounded then.
cudnn
    Closed source: a flash attention of the usual arithmetic, tiles unknown, that flushes subnormal numbers.
    Its backward scales dS in fp32 and rounds it then. torch's own choice of back ends excludes a single key,
    and the backward refuses one query with one key. cudnn-frontend#1071 reports that planning the backward
    of a single row of a single head ends the process (cuDNN 9.26), which ends a certificate. A delta that
    overflows to -inf counts as 0 in its backward (golden/findings/017), and in fp16 keys that pad 64 to 128
    make dQ NaN where scores are below -11 (golden/findings/022).
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
from flashcheck.adapters.given_forward import gradients_given
from flashcheck.adapters.grouped_heads import expanded_heads, summed_group
from flashcheck.arithmetic import Arithmetic, flash
from flashcheck.formats import FP32
from flashcheck.kernel import Capabilities, ForwardResult, Kernel
from flashcheck.problem import Problem

# Of FlashAttention-2, whoever builds it.
FLASH_CAPABILITIES = Capabilities(
    dtypes=("fp16", "bf16"),
    options=("scale", "causal"),
    causal=("bottom_right",),
    head_dim=(8, 256),
    head_dim_multiple=8,
    value_dim_differs=False,
    gqa=True,
    lse=True,
    empty_rows=False,  # LSE +inf
    zero_length=False,
    any_strides=False,
    isolates_nonfinite=False,
    deterministic=False,
    devices=("cuda",),
    # A scale of 0 gives NaN (hidden scores are -inf before they are multiplied), and the running maximum is
    # taken of the products before they are scaled: golden/findings/001.
    nonpositive_scale=False,
)
# Hidden scores are set after the scale here, so that it may have any sign.
EFFICIENT_CAPABILITIES = replace(
    FLASH_CAPABILITIES, causal=("top_left",), value_dim_differs=True, nonpositive_scale=True
)
CUDNN_CAPABILITIES = replace(FLASH_CAPABILITIES, causal=("top_left",), head_dim=(8, 128), fewest_keys=2)


def flash_kernel() -> Kernel:
    """``torch.sdpa.cuda.flash``."""
    return _kernel("flash", FLASH_CAPABILITIES, flash_arithmetic, _flash_call, _flash_gradients)


def efficient_kernel() -> Kernel:
    """``torch.sdpa.cuda.efficient``."""
    gradients = by_autograd(_efficient_call)
    return _kernel("efficient", EFFICIENT_CAPABILITIES, _efficient_arithmetic, _efficient_call, gradients)


def cudnn_kernel() -> Kernel:
    """``torch.sdpa.cuda.cudnn``."""
    return _kernel("cudnn", CUDNN_CAPABILITIES, cudnn_arithmetic, _cudnn_call, _cudnn_gradients)


def math_kernel() -> Kernel:
    """``torch.sdpa.cuda.math``."""
    there = torch_sdpa.math_kernel()
    capabilities = replace(there.capabilities, devices=("cuda",))
    return replace(there, name="torch.sdpa.cuda.math", capabilities=capabilities)


Call = Callable[[Problem, Tensor, Tensor, Tensor], tuple[Any, ...]]
"""O, LSE and more of a problem, given its q and its k and v for every query head."""
Gradients = Callable[[Problem, Tensor, Tensor, Tensor, Tensor], tuple[Tensor, ...]]
"""dq, dk, dv for every query head, given the problem, k, v, O and LSE."""


def _kernel(
    back_end: str,
    capabilities: Capabilities,
    arithmetic: Callable[[Problem], Arithmetic],
    call: Call,
    gradients: Gradients,
) -> Kernel:
    def forward(problem: Problem) -> ForwardResult:
        with torch.no_grad():
            out, lse = call(problem, problem.q, *expanded_heads(problem))[:2]
        return ForwardResult(out, _rows(lse, problem))

    def backward(problem: Problem, out: Tensor, lse: Tensor) -> Mapping[str, Tensor]:
        dq, dk, dv = gradients(problem, *expanded_heads(problem), out, lse)
        return {"dq": dq, "dk": summed_group(dk, problem.group), "dv": summed_group(dv, problem.group)}

    return Kernel(
        name=f"torch.sdpa.cuda.{back_end}",
        forward=forward,
        backward=backward,
        capabilities=capabilities,
        arithmetic=arithmetic,
        source=f"torch {torch.__version__} aten::_scaled_dot_product_{back_end}_attention",
    )


def by_autograd(call: Call) -> Gradients:
    """Gradients of an operator by torch's own formula for it, which keeps and reads O and LSE."""

    def gradients(p: Problem, k: Tensor, v: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, ...]:
        assert p.dout is not None

        def run(leaves: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
            own, own_lse = call(p, leaves["dq"], leaves["dk"], leaves["dv"])[:2]
            return own, own_lse

        found = gradients_given(run, {"dq": p.q, "dk": k, "dv": v}, (out, lse), [p.dout])
        return found["dq"], found["dk"], found["dv"]

    return gradients


def _usual_arithmetic(problem: Problem) -> Arithmetic:
    return flash(problem.format, scale_roundings=2, atomic_dq=True, group_grad_format=problem.format)


def flash_arithmetic(problem: Problem) -> Arithmetic:
    """What torch's build of FlashAttention-2 does with this problem, packed or not."""
    return replace(_usual_arithmetic(problem), scale_placement="scores", flush_subnormals=True)


def cudnn_arithmetic(problem: Problem) -> Arithmetic:
    """What cuDNN does with this problem, whoever calls it."""
    return replace(
        _usual_arithmetic(problem),
        flush_subnormals=True,
        grad_score_format=FP32,
        scaled_grad_score_format=problem.format,
    )


def _efficient_arithmetic(problem: Problem) -> Arithmetic:
    return replace(
        _usual_arithmetic(problem),
        scale_placement="scores",
        grad_score_format=FP32,
        scaled_grad_score_format=problem.format,
        grad_score_probability="rounded",
    )


def _flash_call(p: Problem, q: Tensor, k: Tensor, v: Tensor) -> tuple[Any, ...]:
    op = torch.ops.aten._scaled_dot_product_flash_attention
    result: tuple[Any, ...] = op(q, k, v, 0.0, p.causal is not None, False, scale=p.effective_scale)
    return result


def _flash_gradients(p: Problem, k: Tensor, v: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, ...]:
    own, _, cum_q, cum_k, max_q, max_k, seed, offset, _ = _flash_call(p, p.q, k, v)
    # The back end computes some strides of O instead of reading them: it must lie as it made it.
    stored = torch.empty_like(own).copy_(out)
    op = torch.ops.aten._scaled_dot_product_flash_attention_backward
    sizes = (cum_q, cum_k, max_q, max_k, 0.0, p.causal is not None, seed, offset)
    dq, dk, dv = op(p.dout, p.q, k, v, stored, lse, *sizes, scale=p.effective_scale)
    return dq, dk, dv


def _efficient_call(p: Problem, q: Tensor, k: Tensor, v: Tensor) -> tuple[Any, ...]:
    op = torch.ops.aten._scaled_dot_product_efficient_attention
    result: tuple[Any, ...] = op(q, k, v, None, True, 0.0, p.causal is not None, scale=p.effective_scale)
    return result


def _cudnn_call(p: Problem, q: Tensor, k: Tensor, v: Tensor) -> tuple[Any, ...]:
    op = torch.ops.aten._scaled_dot_product_cudnn_attention
    causal = p.causal is not None
    result: tuple[Any, ...] = op(q, k, v, None, True, 0.0, causal, False, scale=p.effective_scale)
    return result


def _cudnn_gradients(p: Problem, k: Tensor, v: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, ...]:
    gradients = by_autograd(_cudnn_call)
    if not single_row(p):
        return gradients(p, k, v, out, lse)
    two = two_alike(p.replaced(k=k, v=v))
    found = gradients(two, two.k, two.v, torch.cat([out, out]), torch.cat([lse, lse]))
    return tuple(x[:1] for x in found)


def single_row(p: Problem) -> bool:
    """One row of one head, of which cuDNN 9.26 cannot plan the backward (cudnn-frontend#1071)."""
    return p.batch * p.num_heads * p.num_queries == 1


def two_alike(p: Problem) -> Problem:
    """A batch of two of the problem's tensors; nothing else in it may go by batch."""
    assert p.dout is not None
    tensors = {"q": p.q, "k": p.k, "v": p.v, "dout": p.dout}
    return p.replaced(**{name: torch.cat([x, x]) for name, x in tensors.items()})


def _rows(lse: Tensor, problem: Problem) -> Tensor:
    """(batch, heads, Nq) of an LSE that may have padded rows or a last axis of one."""
    shape = (problem.batch, problem.num_heads, problem.num_queries)
    return lse.reshape(*shape[:2], -1)[..., : problem.num_queries]
