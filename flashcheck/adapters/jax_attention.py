"""JAX's attentions on the CPU: ``jax.nn.dot_product_attention`` and the Pallas flash attention, interpreted.

dot_product_attention (XLA)
    Scores in fp32, times the scale; softmax in fp32, normalised, rounded into the input format; the second
    product. XLA may keep more precision than is written, so bits are not predicted.
pallas (jax.experimental.pallas.ops.gpu.attention.mha, interpret mode)
    Key tiles of 128 at most, ascending; scores in fp32 times scale * log2 e; exp2; P is rounded into the
    input format. XLA may contract that product with the subtraction of the maximum into one operation, in
    which the product is not rounded: with scores past 1e10 the exponent of the largest one is not 0 then, and
    NaN may come out. The residual is an LSE in base 2.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flashcheck.arithmetic import Arithmetic, flash
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
    lse=False,
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
        capabilities=DOT_PRODUCT_CAPABILITIES,
        arithmetic=lambda p: flash(p.format, normalise="before_product", scale_placement="scores"),
        source=f"jax {jax.__version__} jax.nn.dot_product_attention, XLA on the CPU",
    )


def pallas_kernel() -> Kernel:
    """``jax.pallas.mha``: the flash attention that JAX ships for GPUs, in Pallas' interpreter."""
    import jax
    from jax.experimental.pallas.ops.gpu import attention  # noqa: F401 - missing in some releases

    return Kernel(
        name="jax.pallas.mha",
        forward=_pallas,
        capabilities=PALLAS_CAPABILITIES,
        arithmetic=_pallas_arithmetic,
        source=f"jax {jax.__version__} jax.experimental.pallas.ops.gpu.attention.mha, interpret mode",
    )


def _pallas_arithmetic(problem: Problem) -> Arithmetic:
    return flash(
        problem.format,
        scale_placement="exponent_fma",
        scale_roundings=1,
        block_keys=_tile(problem.num_keys),
        order="ascending",
    )


def _tile(length: int) -> int:
    """The largest power of two that divides the length, at most 128: the kernel takes whole tiles only."""
    return min(_LARGEST_TILE, length & -length)


def _dot_product(problem: Problem) -> ForwardResult:
    import jax

    p = problem
    mask = None if p.mask is None else _to_jax(p.mask.expand(p.batch, p.num_heads, p.num_queries, p.num_keys))
    q, k, v = (_to_jax(x.transpose(1, 2)) for x in (p.q, p.k, p.v))
    out = jax.nn.dot_product_attention(
        q,
        k,
        v,
        mask=mask,
        scale=p.effective_scale,
        is_causal=p.causal is not None,
        implementation="xla",
    )
    return ForwardResult(_to_torch(out, p.q.dtype).transpose(1, 2))


def _pallas(problem: Problem) -> ForwardResult:
    from jax.experimental.pallas.ops.gpu.attention import BlockSizes, mha

    p = problem
    tile = _tile(p.num_keys)
    sizes = BlockSizes(block_q=tile, block_k=tile)
    out = mha(
        *(_to_jax(x.transpose(1, 2)) for x in (p.q, p.k, p.v)),
        None,
        sm_scale=p.effective_scale,
        causal=p.causal is not None,
        block_sizes=sizes,
        interpret=True,
    )
    return ForwardResult(_to_torch(out, p.q.dtype).transpose(1, 2))


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
