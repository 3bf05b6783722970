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

XLA computes on a CPU with subnormal fp32 operands and results taken for zero. The same functions compiled for
a GPU: ``jax_cuda``.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

from torch import Tensor

from flashcheck.adapters.jax_tensors import import_jax, to_jax, to_torch
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
    jax = import_jax()
    return Kernel(
        name="jax.dot_product_attention",
        forward=lambda problem: dot_product(problem, attend),
        backward=lambda problem, _out, _lse: dot_product_gradients(problem, differentiate),
        capabilities=DOT_PRODUCT_CAPABILITIES,
        arithmetic=dot_product_arithmetic,
        source=f"jax {jax.__version__} jax.nn.dot_product_attention, XLA on the CPU",
    )


def pallas_kernel() -> Kernel:
    """``jax.pallas.mha``: the flash attention that JAX ships for GPUs, in Pallas' interpreter."""
    jax = import_jax()
    pallas = Pallas(mha_module(), tile, interpret=True)
    return Kernel(
        name="jax.pallas.mha",
        forward=pallas.forward,
        backward=pallas.backward,
        capabilities=PALLAS_CAPABILITIES,
        arithmetic=_interpreted_arithmetic,
        source=f"jax {jax.__version__} jax.experimental.pallas.ops.gpu.attention.mha, interpret mode",
    )


def dot_product_arithmetic(problem: Problem) -> Arithmetic:
    """What XLA on a CPU makes of ``jax.nn.dot_product_attention`` and of its derivative."""
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


def pallas_arithmetic(problem: Problem) -> Arithmetic:
    """What the Pallas kernel is written to do."""
    fmt = problem.format
    return flash(
        fmt,
        scale_placement="exponent_fma",
        scale_roundings=1,
        block_keys=tile(problem.num_keys),
        order="ascending",
        grad_score_format=FP32,
        scaled_grad_score_format=fmt,
        delta_format=fmt,
    )


def _interpreted_arithmetic(problem: Problem) -> Arithmetic:
    return replace(pallas_arithmetic(problem), flush_subnormals=True)


def attend(*, causal: bool) -> Callable[..., Any]:
    """``f(q, k, v, mask, scale)``, O: ``dot_product_attention`` by XLA of (batch, length, heads, dim)."""

    def attention(q: Any, k: Any, v: Any, mask: Any, scale: Any) -> Any:
        return import_jax().nn.dot_product_attention(
            q, k, v, mask=mask, scale=scale, is_causal=causal, implementation="xla"
        )

    return attention


def differentiate(*, causal: bool) -> Callable[..., Any]:
    """``f(dout, q, k, v, mask, scale)``, the gradients of q, k and v, by ``jax.vjp``; it keeps P itself and
    uses no stored O or LSE."""

    def gradients(dout: Any, q: Any, k: Any, v: Any, mask: Any, scale: Any) -> Any:
        attention = attend(causal=causal)
        _, pull = import_jax().vjp(lambda *inputs: attention(*inputs, mask, scale), q, k, v)
        return pull(dout)

    return gradients


def dot_product(problem: Problem, maker: Callable[..., Callable[..., Any]]) -> ForwardResult:
    """O by ``maker``'s function: ``attend`` or the same compiled."""
    out = maker(causal=problem.causal is not None)(*_arguments(problem))
    return ForwardResult(to_torch(out).transpose(1, 2))


def dot_product_gradients(problem: Problem, maker: Callable[..., Callable[..., Any]]) -> Mapping[str, Tensor]:
    """The gradients by ``maker``'s function: ``differentiate`` or the same compiled."""
    assert problem.dout is not None
    dout = to_jax(problem.dout.transpose(1, 2))
    return named_gradients(maker(causal=problem.causal is not None)(dout, *_arguments(problem)))


def _arguments(p: Problem) -> tuple[Any, ...]:
    mask = None if p.mask is None else to_jax(p.mask.expand(p.batch, p.num_heads, p.num_queries, p.num_keys))
    return (*inputs_of(p), mask, p.effective_scale)


def inputs_of(p: Problem) -> tuple[Any, ...]:
    """q, k and v as JAX's arrays (batch, length, heads, dim)."""
    return tuple(to_jax(x.transpose(1, 2)) for x in (p.q, p.k, p.v))


def named_gradients(gradients: Sequence[Any]) -> dict[str, Tensor]:
    """dq, dk and dv in torch's layout."""
    return {name: to_torch(x).transpose(1, 2) for name, x in zip(("dq", "dk", "dv"), gradients, strict=True)}


def tile(length: int) -> int:
    """The largest power of two that divides the length, at most 128: the kernel takes whole tiles only."""
    return min(_LARGEST_TILE, length & -length)


@dataclass(frozen=True, slots=True)
class Pallas:
    """The Pallas kernel.

    Attributes:
        module: JAX's, of ``mha_module``.
        backward_tile: the tile of the backward's loops, given the length.
        interpret: Pallas' interpreter; otherwise it is compiled by Triton.
    """

    module: Any
    backward_tile: Callable[[int], int]
    interpret: bool

    def forward(self, problem: Problem) -> ForwardResult:
        """O and, from base 2, the LSE."""
        out, lse = self.module.mha(
            *inputs_of(problem),
            None,
            sm_scale=problem.effective_scale,
            causal=problem.causal is not None,
            block_sizes=self._blocks(problem),
            interpret=self.interpret,
            return_residuals=True,
        )
        natural = to_torch(lse).double() * math.log(2.0)
        return ForwardResult(to_torch(out).transpose(1, 2), natural.float())

    def backward(self, problem: Problem, out: Tensor, lse: Tensor) -> Mapping[str, Tensor]:
        """On the O and LSE that are given; ``mha`` differentiated would take its own."""
        assert problem.dout is not None
        base_two = (lse.double() / math.log(2.0)).float()
        residuals = (*inputs_of(problem), None, to_jax(out.transpose(1, 2)), to_jax(base_two))
        blocks, causal = self._blocks(problem), problem.causal is not None
        run = _pallas_backward(problem.effective_scale, causal, blocks, self.interpret)
        return named_gradients(run(residuals, to_jax(problem.dout.transpose(1, 2)))[:3])

    def _blocks(self, problem: Problem) -> Any:
        whole, part = tile(problem.num_keys), self.backward_tile(problem.num_keys)
        return self.module.BlockSizes(whole, whole, part, part, part, part)


@cache
def _pallas_backward(scale: float, causal: bool, blocks: Any, interpret: bool) -> Callable[..., Any]:
    """``f(residuals, dout)``, compiled once for each shape where it is not interpreted."""
    statics = (scale, causal, blocks, "triton", None, 2, None, interpret, False, False)
    run = partial(mha_module()._mha_backward, *statics)
    return run if interpret else import_jax().jit(run)


def mha_module() -> Any:
    """jax.experimental.pallas.ops.gpu.attention; some releases lack it, later ones advise another package."""
    import_jax()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        from jax.experimental.pallas.ops.gpu import attention
    return attention
