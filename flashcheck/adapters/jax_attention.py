"""JAX's attentions on the CPU: ``jax.nn.dot_product_attention`` and the Pallas flash attention, interpreted.

dot_product_attention (XLA)
    Scores in fp32, times the scale; softmax in fp32, normalised, rounded into the input format; the second
    product. XLA may keep more precision than is written, so bits are not predicted. The derivative is JAX's:
    dP is rounded into the input format; the softmax's derivative in fp32, of the unrounded P; times the scale
    in fp32. The products with K and Q are asked for in the input format, but XLA on a CPU takes dS as it is;
    they sum over a group in fp32.
pallas (jax.experimental.pallas.ops.gpu.attention.mha, interpret mode)
    Key tiles of 128 at most, ascending; scores in fp32 times scale * log2 e; exp2; P is rounded into the
    input format. XLA may contract that product with the subtraction of the maximum into one operation, in
    which the product is not rounded: with scores past 1e10 the exponent of the largest one is not 0 then, and
    NaN may come out. The LSE is kept in base 2. The backward scales dS in fp32 and rounds it then; delta is
    taken in the input format (golden/findings/013).

XLA computes on a CPU with subnormal fp32 operands and results taken for zero.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from flashcheck.arithmetic import Arithmetic, flash
from flashcheck.formats import FP32
from flashcheck.kernel import Capabilities, ForwardResult, Kernel
from flashcheck.problem import Problem

DOT_PRODUCT_CAPABILITIES = Capabilities(
    dtypes=("fp16", "bf16", "fp32"),
    options=("scale", "causal", "mask"),
    causal=("top_left",),
    head_dim=(1, 256),
    gqa=True,
    empty_rows=False,
    zero_length=False,
    isolates_nonfinite=False,
    devices=("cpu",),
)

PALLAS_CAPABILITIES = Capabilities(
    dtypes=("fp16", "bf16", "fp32"),
    options=("scale", "causal"),
    causal=("top_left",),
    head_dim=(16, 128),
    head_dim_multiple=16,
    lse=True,
    empty_rows=False,
    cross_lengths=False,
    zero_length=False,
    isolates_nonfinite=False,
    devices=("cpu",),
)

_LARGEST_TILE = 128


def dot_product_kernel() -> Kernel:
    """``jax.dot_product_attention``."""
    import jax

    return Kernel(
        name="jax.dot_product_attention",
        forward=_dot_product,
        backward=_dot_product_gradients,
        capabilities=DOT_PRODUCT_CAPABILITIES,
        arithmetic=dot_product_arithmetic,
        source=f"jax {jax.__version__} jax.nn.dot_product_attention, XLA on the CPU",
    )


def pallas_kernel() -> Kernel:
    """``jax.pallas.mha``: the flash attention that JAX ships for GPUs, in Pallas' interpreter."""
    import jax
    from jax.experimental.pallas.ops.gpu import attention  # noqa: F401 - missing in some releases

    return Kernel(
        name="jax.pallas.mha",
        forward=_pallas,
        backward=_pallas_gradients,
        capabilities=PALLAS_CAPABILITIES,
        arithmetic=_pallas_arithmetic,
        source=f"jax {jax.__version__} jax.experimental.pallas.ops.gpu.attention.mha, interpret mode",
    )


def dot_product_arithmetic(problem: Problem) -> Arithmetic:
    """What XLA makes of ``jax.nn.dot_product_attention`` and of its derivative."""
    fmt = problem.format
    return flash(
        fmt,
        normalise="before_product",
        scale_placement="scores",
        grad_probability_format=fmt,
        grad_score_format=FP32,
        scaled_grad_score_format=FP32,
        flush_subnormals=True,
    )


def _pallas_arithmetic(problem: Problem) -> Arithmetic:
    fmt = problem.format
    return flash(
        fmt,
        scale_placement="exponent_fma",
        scale_roundings=1,
        block_keys=_tile(problem.num_keys),
        order="ascending",
        grad_score_format=FP32,
        scaled_grad_score_format=fmt,
        delta_format=fmt,
        flush_subnormals=True,
    )


def _tile(length: int) -> int:
    """The largest power of two that divides the length, at most 128: the kernel takes whole tiles only."""
    return min(_LARGEST_TILE, length & -length)


def _attention_of(p: Problem) -> Callable[..., Any]:
    """``dot_product_attention`` of (batch, length, heads, dim) with the problem's options."""
    import jax

    mask = None if p.mask is None else _to_jax(p.mask.expand(p.batch, p.num_heads, p.num_queries, p.num_keys))
    return partial(
        jax.nn.dot_product_attention,
        mask=mask,
        scale=p.effective_scale,
        is_causal=p.causal is not None,
        implementation="xla",
    )


def _inputs(p: Problem) -> tuple[Any, ...]:
    return tuple(_to_jax(x.transpose(1, 2)) for x in (p.q, p.k, p.v))


def _dot_product(problem: Problem) -> ForwardResult:
    out = _attention_of(problem)(*_inputs(problem))
    return ForwardResult(_to_torch(out, problem.q.dtype).transpose(1, 2))


def _dot_product_gradients(problem: Problem, out: Tensor, lse: Tensor) -> Mapping[str, Tensor]:
    """By ``jax.vjp``; it keeps P itself and uses neither ``out`` nor ``lse``."""
    import jax

    del out, lse
    assert problem.dout is not None
    _, pull = jax.vjp(_attention_of(problem), *_inputs(problem))
    gradients = pull(_to_jax(problem.dout.transpose(1, 2)))
    return {
        name: _to_torch(x, problem.q.dtype).transpose(1, 2)
        for name, x in zip(("dq", "dk", "dv"), gradients, strict=True)
    }


def _pallas(problem: Problem) -> ForwardResult:
    from jax.experimental.pallas.ops.gpu.attention import mha

    out, lse = mha(
        *_inputs(problem),
        None,
        sm_scale=problem.effective_scale,
        causal=problem.causal is not None,
        block_sizes=_blocks(problem),
        interpret=True,
        return_residuals=True,
    )
    natural = _to_torch(lse, torch.float32).double() * math.log(2.0)
    return ForwardResult(_to_torch(out, problem.q.dtype).transpose(1, 2), natural.float())


def _pallas_gradients(problem: Problem, out: Tensor, lse: Tensor) -> Mapping[str, Tensor]:
    """The backward kernels on the O and LSE that are given; ``mha`` differentiated would take its own."""
    from jax.experimental.pallas.ops.gpu.attention import _mha_backward

    assert problem.dout is not None
    base_two = (lse.double() / math.log(2.0)).float()
    residuals = (*_inputs(problem), None, _to_jax(out.transpose(1, 2)), _to_jax(base_two))
    dq, dk, dv, _ = _mha_backward(
        sm_scale=problem.effective_scale,
        causal=problem.causal is not None,
        block_sizes=_blocks(problem),
        backward_pass_impl="triton",
        num_warps=None,
        num_stages=2,
        grid=None,
        interpret=True,
        debug=False,
        return_residuals=False,
        res=residuals,
        do=_to_jax(problem.dout.transpose(1, 2)),
    )
    return {
        name: _to_torch(x, problem.q.dtype).transpose(1, 2)
        for name, x in (("dq", dq), ("dk", dk), ("dv", dv))
    }


def _blocks(problem: Problem) -> Any:
    """Tiles that divide the lengths: the kernels take whole ones only."""
    from jax.experimental.pallas.ops.gpu.attention import BlockSizes

    tile = _tile(problem.num_keys)
    return BlockSizes(
        block_q=tile, block_k=tile, block_q_dkv=tile, block_kv_dkv=tile, block_q_dq=tile, block_kv_dq=tile
    )


def _to_jax(x: Tensor) -> Any:
    """A copy on the CPU; 16-bit tensors travel as their codes, since numpy has no bf16."""
    import jax.numpy as jnp
    import numpy as np

    x = x.contiguous()
    if x.dtype == torch.bfloat16:
        return jnp.asarray(x.view(torch.int16).numpy().view(np.uint16)).view(jnp.bfloat16)
    return jnp.asarray(x.numpy())


def _to_torch(x: Any, dtype: torch.dtype) -> Tensor:
    import numpy as np

    if dtype == torch.bfloat16:
        return torch.from_numpy(np.array(x.view(np.uint16)).view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(np.array(x))
