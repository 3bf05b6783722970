"""JAX's attentions on CUDA: ``jax.nn.dot_product_attention`` by XLA and by cuDNN, the Pallas one by Triton.

Everything is compiled by ``jax.jit``, once for a shape. Read from jax 0.11.2 (jax/_src/nn/functions.py,
jax/_src/cudnn, jax/experimental/pallas/ops/gpu/attention.py, jax/_src/pallas/triton/lowering.py):

xla
    The steps of ``jax_attention``. The products with K and Q name an algorithm of 16-bit operands, which a
    GPU obeys: the scaled dS is rounded into the input format first. e^x may be 2^(x log2 e), the constant and
    the product rounded; subnormal numbers are kept. Products and reductions are chosen by measuring them, and
    nothing promises the same bits twice. fp32 is run with ``jax.default_matmul_precision("highest")``: the
    default takes TF32 products, and which way it rounds their operands is not said. Compiled, fp16 raises for
    one query or one key (golden/findings/026).
cudnn
    The function behind ``implementation="cudnn"``, which returns the LSE in fp32; the gradients by its own
    rule, at the O and LSE that are given. The library is that of ``torch.sdpa.cuda.cudnn``, its arithmetic
    the same, and a single row has its gradients as one of two here too. Head dims that divide by 8, up to 256
    on Hopper. A boolean mask is added to the scores as -2^15 (fp16) or -2^41 (bf16), which hides no key
    beside scores of that size, and a window only looks back: neither is declared.
pallas
    The kernel of ``jax_attention`` compiled by XLA's Triton, fp16 and bf16; tiles from 16 to 128 in the
    forward and to 32 in the backward (the library's defaults), so lengths divide by 16. Triton may or may not
    contract the scaled product with the subtraction of the maximum: the product's own rounding is declared
    as well.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from flashcheck.adapters import jax_attention
from flashcheck.adapters.jax_attention import Pallas, inputs_of, named_gradients, tile
from flashcheck.adapters.jax_tensors import import_jax, to_jax, to_torch
from flashcheck.adapters.optional import required
from flashcheck.adapters.torch_sdpa_cuda import cudnn_arithmetic, single_row, two_alike
from flashcheck.arithmetic import Arithmetic
from flashcheck.errors import UnusableError
from flashcheck.kernel import ForwardResult, Kernel
from flashcheck.problem import Problem

XLA_CAPABILITIES = replace(jax_attention.DOT_PRODUCT_CAPABILITIES, devices=("cuda",), deterministic=False)
CUDNN_CAPABILITIES = replace(
    XLA_CAPABILITIES,
    dtypes=("fp16", "bf16"),
    options=("scale", "causal"),
    head_dim=(8, 256),
    head_dim_multiple=8,
    lse=True,
    fewest_keys=2,
    nonpositive_scale=False,  # golden/findings/001
)
PALLAS_CAPABILITIES = replace(
    jax_attention.PALLAS_CAPABILITIES, dtypes=("fp16", "bf16"), devices=("cuda",), length_multiple=16
)

_INSTALL = "pip install 'jax[cuda13]'"
_CUDNN = "jax._src.cudnn.fused_attention_stablehlo"
_BACKWARD_TILE = 32


def xla_kernel() -> Kernel:
    """``jax.cuda.xla``."""
    version = _version("jax.cuda.xla")
    return Kernel(
        name="jax.cuda.xla",
        forward=_xla,
        backward=_xla_gradients,
        capabilities=XLA_CAPABILITIES,
        arithmetic=xla_arithmetic,
        source=f"jax {version} jax.nn.dot_product_attention, implementation='xla', on CUDA",
    )


def cudnn_kernel() -> Kernel:
    """``jax.cuda.cudnn``."""
    version = _version("jax.cuda.cudnn")
    cudnn = _Cudnn()
    return Kernel(
        name="jax.cuda.cudnn",
        forward=cudnn.forward,
        backward=cudnn.backward,
        capabilities=CUDNN_CAPABILITIES,
        arithmetic=cudnn_arithmetic,
        source=f"jax {version} jax.nn.dot_product_attention, implementation='cudnn'",
    )


def pallas_kernel() -> Kernel:
    """``jax.cuda.pallas``."""
    version = _version("jax.cuda.pallas")
    required("jax.cuda.pallas", "jax.experimental.pallas.triton", ("CompilerParams",), _INSTALL)
    pallas = Pallas(
        jax_attention.mha_module(), lambda length: min(tile(length), _BACKWARD_TILE), interpret=False
    )
    return Kernel(
        name="jax.cuda.pallas",
        forward=pallas.forward,
        backward=pallas.backward,
        capabilities=PALLAS_CAPABILITIES,
        arithmetic=pallas_arithmetic,
        source=f"jax {version} jax.experimental.pallas.ops.gpu.attention.mha, compiled by Triton",
    )


def xla_arithmetic(problem: Problem) -> Arithmetic:
    """What XLA on a GPU makes of ``jax.nn.dot_product_attention`` and of its derivative."""
    return replace(
        jax_attention.dot_product_arithmetic(problem),
        scale_roundings=3,  # the scale; log2 e and the product with it
        scaled_grad_score_format=problem.format,
        flush_subnormals=False,
    )


def pallas_arithmetic(problem: Problem) -> Arithmetic:
    """What XLA's Triton makes of the Pallas kernel."""
    return replace(jax_attention.pallas_arithmetic(problem), score_roundings=1)


def _version(name: str) -> str:
    """JAX's, where it is installed and, beside a GPU that torch sees, finds one itself.

    Raises UnusableError, for the kernel ``name``, where not.
    """
    required(name, "jax", ("jit", "dlpack"), _INSTALL)
    jax = import_jax()
    if torch.cuda.is_available():
        try:
            jax.devices("cuda")
        except RuntimeError as error:
            line = str(error).strip().partition("\n")[0]
            raise UnusableError(name, f"jax finds no CUDA device: {line} ({_INSTALL})") from None
    return str(jax.__version__)


def _xla(problem: Problem) -> ForwardResult:
    with _precision(problem):
        return jax_attention.dot_product(problem, partial(_compiled, jax_attention.attend))


def _xla_gradients(problem: Problem, out: Tensor, lse: Tensor) -> Mapping[str, Tensor]:
    del out, lse
    with _precision(problem):
        return jax_attention.dot_product_gradients(problem, partial(_compiled, jax_attention.differentiate))


def _precision(problem: Problem) -> AbstractContextManager[Any]:
    if problem.q.dtype != torch.float32:
        return nullcontext()
    precision: AbstractContextManager[Any] = import_jax().default_matmul_precision("highest")
    return precision


@cache
def _compiled(maker: Callable[..., Callable[..., Any]], *, causal: bool) -> Callable[..., Any]:
    compiled: Callable[..., Any] = import_jax().jit(maker(causal=causal))
    return compiled


class _Cudnn:
    """The function behind ``implementation="cudnn"`` and its rule for gradients."""

    def __init__(self) -> None:
        names = ("MaskType", "AttentionLayout", "dot_product_attention", "_dot_product_attention_bwd_rule")
        found = required("jax.cuda.cudnn", _CUDNN, names, "jax 0.11.2 has it")
        self.masks, self.layouts, self.attention, self.rule = found

    def forward(self, problem: Problem) -> ForwardResult:
        """O and the LSE in fp32, (batch, heads, length)."""
        run = self._forward(problem.effective_scale, causal=problem.causal is not None)
        out, lse = run(*inputs_of(problem))
        return ForwardResult(to_torch(out).transpose(1, 2), to_torch(lse))

    def backward(self, problem: Problem, out: Tensor, lse: Tensor) -> Mapping[str, Tensor]:
        """The gradients at this O and LSE; of a single row of a single head as the first of two alike."""
        if single_row(problem):
            found = self.backward(two_alike(problem), torch.cat([out, out]), torch.cat([lse, lse]))
            return {name: x[:1] for name, x in found.items()}
        assert problem.dout is not None
        run = self._backward(problem.effective_scale, causal=problem.causal is not None)
        out_, dout = (to_jax(x.transpose(1, 2)) for x in (out, problem.dout))
        return named_gradients(run(*inputs_of(problem), out_, to_jax(lse), dout))

    @cache  # noqa: B019 - one object, kept by its kernel
    def _forward(self, scale: float, *, causal: bool) -> Callable[..., Any]:
        options = {"scale": scale, "mask_type": self._mask(causal), "return_residual": True}
        compiled: Callable[..., Any] = import_jax().jit(partial(self.attention, **options))
        return compiled

    @cache  # noqa: B019 - one object, kept by its kernel
    def _backward(self, scale: float, *, causal: bool) -> Callable[..., Any]:
        jax = import_jax()
        seed, dropout, bias, window, paged = 42, 0.0, (False, False), None, False
        statics = (
            scale,
            seed,
            dropout,
            bias,
            self._mask(causal),
            self.layouts.BTNH.value,
            window,
            paged,
            False,
        )

        def gradients(q: Any, k: Any, v: Any, out: Any, lse: Any, dout: Any) -> Any:
            unused = jax.numpy.zeros(
                0, dtype=q.dtype
            )  # bias, lengths, offsets and pages, as the function does
            return self.rule(*statics, (q, k, v, *[unused] * 7, lse, out), dout)[:3]

        compiled: Callable[..., Any] = jax.jit(gradients)
        return compiled

    def _mask(self, causal: bool) -> Any:
        return self.masks.CAUSAL if causal else self.masks.NO_MASK
