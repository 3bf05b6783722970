"""torch's own ``scaled_dot_product_attention`` on the CPU: the flash and the math back end.

Read from torch (aten/src/ATen/native/cpu/FlashAttentionKernel.cpp and native/transformers/attention.cpp)
and confirmed by measurement on 2.13, AVX2:

flash
    Key tiles of 512, ascending; query tiles of 32 (64 from 192 queries, 256 from 768). Scores are
    multiplied by the fp32 scale, then a mask is added, then the running maximum is subtracted. Row sums
    are taken over the unrounded fp32 exponentials; P is rounded into the input format. The LSE is a
    natural logarithm. The backward recomputes P from the LSE and keeps dQ, dK and dV *in the input
    format* while it sums over tiles.
math
    16-bit inputs are widened to fp32, q and k are each multiplied by sqrt(scale), P is normalised and
    stays fp32, the output is rounded once. It returns no LSE; its backward is autograd's.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from flashcheck.adapters.grouped_heads import expanded_heads, summed_group
from flashcheck.adapters.sdpa_masks import additive_mask
from flashcheck.arithmetic import IEEE, Arithmetic, eager_fp32, flash
from flashcheck.errors import ArgumentError
from flashcheck.kernel import Capabilities, ForwardResult, Kernel
from flashcheck.problem import Problem

# Largest relative errors of torch's vectorised exponentials over every binade of [-87.3, 0], found by
# evaluating their polynomials at 8 million points: 16-bit inputs take Vectorized::fexp_u20 (cubic
# polynomial, 1.124e-4, and exp(0) = 1 - 5.3e-5), fp32 takes exp_u20 (3.27 * 2^-23, worst near -87).
FEXP_U20_ERROR = 2.0**-13
EXP_U20_ERROR = 4.0 * 2.0**-23
# exp_u20 builds 2^(n-1) and doubles it: n = -126 makes the exponent field 0, so results under 2^-125.5
# come out as 0.
EXP_U20_FLUSH = 2.0**-125

FLASH_CAPABILITIES = Capabilities(
    dtypes=("fp16", "bf16", "fp32"),
    options=("scale", "causal", "mask", "bias"),
    causal=("top_left",),
    head_dim=(1, 512),
    value_dim_differs=False,
    gqa=True,
    lse=True,
    # The output of a row without visible keys is 0 as the contract wants, but its LSE is 0, not -inf.
    empty_rows=False,
    cross_lengths=True,
    zero_length=False,
    any_strides=False,
    # A hidden V row is multiplied by P = 0, so its NaN reaches every row of the query tile. With 16-bit
    # inputs, fexp_u20(NaN) = -0: a row that sees an infinite score comes out as 0.
    isolates_nonfinite=False,
    deterministic=True,
    devices=("cpu",),
    # Causality writes -inf into the scores *before* they are multiplied by the scale: -inf * 0 is NaN
    # and -inf * -1 is +inf.
    not_together=(("causal", "nonpositive_scale"),),
)

MATH_CAPABILITIES = Capabilities(
    dtypes=("fp16", "bf16", "fp32"),
    options=("scale", "causal", "mask", "bias"),
    causal=("top_left",),
    head_dim=(1, 512),
    value_dim_differs=True,
    gqa=True,
    lse=False,
    empty_rows=True,
    cross_lengths=True,
    zero_length=False,  # O is then (q.sum() + ...) * 0, NaN where the sum overflows: golden/findings/010
    any_strides=True,
    # Masks are additive: NaN + -inf is NaN, in every row.
    isolates_nonfinite=False,
    deterministic=True,
    devices=("cpu",),
)


def flash_kernel() -> Kernel:
    """``torch.sdpa.flash``: the CPU flash back end, called through its operator, which returns the LSE."""
    return Kernel(
        name="torch.sdpa.flash",
        forward=_flash_forward,
        backward=_flash_backward,
        capabilities=FLASH_CAPABILITIES,
        arithmetic=flash_arithmetic,
        source=f"torch {torch.__version__} aten::_scaled_dot_product_flash_attention_for_cpu",
    )


def math_kernel() -> Kernel:
    """``torch.sdpa.math``: the eager back end, forced with ``sdpa_kernel``."""
    return Kernel(
        name="torch.sdpa.math",
        forward=_math_forward,
        backward=_math_backward,
        capabilities=MATH_CAPABILITIES,
        arithmetic=math_arithmetic,
        source=f"torch {torch.__version__} aten::_scaled_dot_product_attention_math",
    )


def flash_arithmetic(problem: Problem) -> Arithmetic:
    """What the CPU flash back end does with this problem."""
    fmt = problem.format
    narrow = fmt.name != "fp32"
    return flash(
        fmt,
        block_keys=512,
        order="ascending",
        scale_placement="scores",
        exp_error=FEXP_U20_ERROR if narrow else EXP_U20_ERROR,
        exp_flush=EXP_U20_FLUSH,
        # The backward takes Vectorized::exp, which is libm-grade (1 ulp).
        backward_exp_error=IEEE.exp_error,
        backward_exp_flush=IEEE.exp_flush,
        grad_accumulator_format=fmt if narrow else None,
        block_queries=_flash_query_tile(problem.num_queries),
        group_grad_format=fmt if narrow else None,
    )


def math_arithmetic(problem: Problem) -> Arithmetic:
    """What the math back end does with this problem."""
    return eager_fp32(problem.format)


def _flash_query_tile(num_queries: int) -> int:
    if num_queries >= 768:
        return 256
    return 64 if num_queries >= 192 else 32


def _flash_forward(problem: Problem) -> ForwardResult:
    _check_flash(problem)
    if problem.num_queries == 0:  # the operator divides by the number of queries
        shape = (problem.batch, problem.num_heads, 0, problem.value_dim)
        return ForwardResult(problem.q.new_zeros(shape), problem.q.new_zeros(shape[:3], dtype=torch.float32))
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        problem.q,
        *expanded_heads(problem),
        0.0,
        problem.causal is not None,
        attn_mask=additive_mask(problem, fold_causal=False),
        scale=_scale(problem),
    )
    return ForwardResult(out, lse)


def _flash_backward(problem: Problem, out: Tensor, lse: Tensor) -> Mapping[str, Tensor]:
    _check_flash(problem)
    if problem.dlse is not None:
        raise ArgumentError("dlse", "given", "None: this back end has no gradient of the log-sum-exp")
    if problem.num_queries == 0:
        return {
            "dq": torch.zeros_like(problem.q),
            "dk": torch.zeros_like(problem.k),
            "dv": torch.zeros_like(problem.v),
        }
    dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        problem.dout,
        problem.q,
        *expanded_heads(problem),
        out,
        lse,
        0.0,
        problem.causal is not None,
        attn_mask=additive_mask(problem, fold_causal=False),
        scale=_scale(problem),
    )
    return {"dq": dq, "dk": summed_group(dk, problem.group), "dv": summed_group(dv, problem.group)}


def _check_flash(problem: Problem) -> None:
    """Refuses what the operator, unlike the public function, does not check before it reads memory."""
    if problem.num_keys == 0:
        raise ArgumentError("k.shape[2]", 0, "at least one key (the operator dies of an integer division)")
    if problem.value_dim != problem.head_dim:
        raise ArgumentError("v.shape[3]", problem.value_dim, f"the head dim of q, {problem.head_dim}")
    for name in ("q", "k", "v"):
        x = getattr(problem, name)
        if x.shape[3] > 1 and x.stride(3) != 1:
            raise ArgumentError(
                f"{name}.stride(3)", x.stride(3), "1 (the operator does not read this stride)"
            )


def _scale(problem: Problem) -> float | None:
    """None where the back end's own default is meant; descales of q and k fold into the scale."""
    if problem.v_descale != 1.0:
        raise ArgumentError("v_descale", problem.v_descale, "1.0: this kernel takes no quantised values")
    if problem.scale is None and problem.q_descale == problem.k_descale == 1.0:
        return None
    return problem.effective_scale


def _math_call(problem: Problem, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    with sdpa_kernel(SDPBackend.MATH):
        return scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=mask,
            is_causal=problem.causal is not None and mask is None,
            scale=_scale(problem),
            enable_gqa=problem.group != 1,
        )


def _math_mask(problem: Problem) -> Tensor | None:
    return additive_mask(problem, fold_causal=problem.mask is not None or problem.bias is not None)


def _math_forward(problem: Problem) -> ForwardResult:
    with torch.no_grad():
        return ForwardResult(_math_call(problem, problem.q, problem.k, problem.v, _math_mask(problem)))


def _math_backward(problem: Problem, out: Tensor, lse: Tensor) -> Mapping[str, Tensor]:
    """Autograd through the forced back end; it keeps P itself and uses neither ``out`` nor ``lse``."""
    del out, lse
    if problem.dlse is not None:
        raise ArgumentError("dlse", "given", "None: this back end has no log-sum-exp")
    leaves = [x.detach().clone().requires_grad_() for x in (problem.q, problem.k, problem.v)]
    bias = None if problem.bias is None else problem.bias.detach().clone().requires_grad_()
    tracked = problem if bias is None else problem.replaced(bias=bias)
    q, k, v = leaves
    result = _math_call(problem, q, k, v, _math_mask(tracked))
    names = ["dq", "dk", "dv"]
    if bias is not None:
        leaves.append(bias)
        names.append("dbias")
    # Without keys the output depends on nothing: what autograd then does not reach has a gradient of 0.
    gradients = torch.autograd.grad(result, leaves, problem.dout, allow_unused=True, materialize_grads=True)
    return dict(zip(names, gradients, strict=True))
