"""torch's ``flex_attention``, eager (its reference implementation) and compiled (a Triton kernel).

The contract's options become a mask_mod (causality, windows, masks, padding) and a score_mod (cap, bias,
ALiBi). Read from torch: torch/_higher_order_ops/flex_attention.py and
torch/_inductor/kernel/flex/templates/common.py.jinja.

eager
    Scores in fp32, times the scale; softmax in fp32; P is normalised, rounded into the input format and
    multiplied with V in that format.
compiled
    Key tiles in ascending order (those that a block mask leaves); scores in fp32, times the scale, then times
    log2 e, each product rounded; P is rounded into the input format and enters the product unnormalised.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from flashcheck.arithmetic import Arithmetic, flash
from flashcheck.kernel import Capabilities, ForwardResult, Kernel
from flashcheck.problem import Problem

_OPTIONS = ("scale", "causal", "window", "mask", "bias", "alibi_slopes", "softcap", "key_lengths")

_MOST_SHAPES = 1_000_000

_COMMON: dict[str, Any] = {
    "options": _OPTIONS,
    "causal": ("top_left", "bottom_right"),
    "gqa": True,
    "lse": True,
    "empty_rows": True,
    "cross_lengths": True,
    "any_strides": True,
}

EAGER_CAPABILITIES = Capabilities(
    dtypes=("fp16", "bf16", "fp32"),
    head_dim=(1, 256),
    value_dim_differs=True,
    zero_length=False,
    # P V multiplies hidden rows of V by zero: NaN there reaches every row.
    isolates_nonfinite=False,
    **_COMMON,
)

COMPILED_CAPABILITIES = Capabilities(
    dtypes=("fp16", "bf16"),
    head_dim=(16, 256),
    value_dim_differs=True,
    zero_length=False,
    isolates_nonfinite=False,
    devices=("cuda",),
    **_COMMON,
)


def eager_kernel() -> Kernel:
    """``torch.flex.eager``: flex_attention without torch.compile, its own reference."""
    return Kernel(
        name="torch.flex.eager",
        forward=lambda problem: _call(_uncompiled, problem),
        capabilities=EAGER_CAPABILITIES,
        arithmetic=eager_arithmetic,
        source=f"torch {torch.__version__} flex_attention, not compiled",
    )


def compiled_kernel() -> Kernel:
    """``torch.flex.compiled``: the Triton kernel that torch.compile makes of flex_attention."""
    return Kernel(
        name="torch.flex.compiled",
        forward=lambda problem: _call(_run_compiled, problem),
        capabilities=COMPILED_CAPABILITIES,
        arithmetic=compiled_arithmetic,
        source=f"torch {torch.__version__} flex_attention, compiled",
    )


def _uncompiled(*tensors: Tensor, **options: Any) -> Any:
    """flex_attention with its switch for debugging on: without it, every new shape is traced first (the
    arithmetic is the same)."""
    module: Any = importlib.import_module("torch.nn.attention.flex_attention")
    before = module._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG
    module._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG = True
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return module.flex_attention(*tensors, **options)
    finally:
        module._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG = before


def _run_compiled(*tensors: Tensor, **options: Any) -> Any:
    """Every shape is compiled: past its usual limit torch would run the eager implementation without a word
    that a caller sees, and the verdict would be on that."""
    config: Any = importlib.import_module("torch._dynamo.config")
    with config.patch(
        recompile_limit=_MOST_SHAPES,
        accumulated_recompile_limit=_MOST_SHAPES,
        fail_on_recompile_limit_hit=True,
    ):
        return _compiled()(*tensors, **options)


@cache
def _compiled() -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False)


def eager_arithmetic(problem: Problem) -> Arithmetic:
    """What the eager implementation does with this problem."""
    return flash(problem.format, normalise="before_product", scale_placement="scores")


def compiled_arithmetic(problem: Problem) -> Arithmetic:
    """What the compiled kernel does with this problem; its tiles are chosen by the compiler."""
    return flash(problem.format, scale_placement="scores", scale_roundings=2, score_roundings=1)


def _call(attention: Callable[..., Any], problem: Problem) -> ForwardResult:
    from torch.nn.attention.flex_attention import AuxRequest

    p = _without_padding(problem)
    with torch.no_grad():
        out, aux = attention(
            p.q,
            p.k,
            p.v,
            score_mod=_score_mod(p),
            block_mask=_block_mask(p),
            scale=p.effective_scale,
            enable_gqa=p.group != 1,
            return_aux=AuxRequest(lse=True),
        )
    return ForwardResult(out, aux.lse)


def _score_mod(problem: Problem) -> Callable[..., Tensor] | None:
    """softcap(score) + bias + ALiBi, in the contract's order; None where nothing is added."""
    p = problem
    cap, bias, alibi = p.softcap, p.bias, p.alibi_slopes
    if cap is None and bias is None and alibi is None:
        return None
    offset = p.num_keys - p.num_queries

    def score_mod(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        if cap is not None:
            score = cap * torch.tanh(score / cap)
        if bias is not None:
            score = score + _at(bias, b, h, i, j).float()
        if alibi is not None:
            slope = alibi[b, h] if alibi.dim() == 2 else alibi[h]
            score = score - slope * (i + offset - j).abs()
        return score

    return score_mod


def _without_padding(p: Problem) -> Problem:
    """Padding may hold anything; here it is data that a mask hides, which must be finite: zeros."""
    if p.key_lengths is None:
        return p
    padding = torch.arange(p.num_keys, device=p.k.device) >= p.key_lengths.unsqueeze(-1)
    hidden = padding[:, None, :, None]
    return p.replaced(k=p.k.masked_fill(hidden, 0.0), v=p.v.masked_fill(hidden, 0.0))


def _block_mask(problem: Problem) -> Any:
    """The problem's visibility as a block mask; None where everything is visible."""
    from torch.nn.attention.flex_attention import create_block_mask

    p = problem
    if p.causal is None and p.window is None and p.mask is None and p.key_lengths is None:
        return None
    offset = p.num_keys - p.num_queries
    shift = 0 if p.causal == "top_left" else offset
    causal, lengths, mask = p.causal is not None, p.key_lengths, p.mask
    left, right = p.window if p.window is not None else (None, None)

    def mask_mod(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        seen = (i >= 0) & (j >= 0)
        if causal:
            seen = seen & (j <= i + shift)
        if left is not None:
            seen = seen & (j >= i + shift - left)
        if right is not None:
            seen = seen & (j <= i + shift + right)
        if lengths is not None:
            seen = seen & (j < lengths[b])
        if mask is not None:
            seen = seen & _at(mask, b, h, i, j)
        return seen

    return create_block_mask(
        mask_mod, p.batch, p.num_heads, p.num_queries, p.num_keys, device=str(p.q.device)
    )


def _at(x: Tensor, *indices: Tensor) -> Tensor:
    """x[b, h, i, j], where a size of 1 stands for every index."""
    b, h, i, j = (index * 0 if size == 1 else index for index, size in zip(indices, x.shape, strict=True))
    return x[b, h, i, j]
