"""torch's ``flex_attention``, eager (its reference implementation) and compiled (a Triton kernel).

The contract's options become a mask_mod (causality, windows, masks, padding) and a score_mod (cap, bias,
ALiBi). Read from torch 2.11 and 2.13: torch/_higher_order_ops/flex_attention.py,
torch/_inductor/kernel/flex/flex_attention.py, flex_decoding.py and templates/.

eager
    Scores in fp32, times the scale; softmax in fp32; P is normalised, rounded into the input format and
    multiplied with V in that format, on CUDA without partial sums in it (``torch_products``). The backward
    (``torch_flex_backward.py``) takes P of the stored LSE.
compiled
    Key tiles that a block mask cuts come before those that it leaves whole, so their order is not declared.
    Scores in fp32, times the scale, then times log2 e: two products, of which the compiler may contract the
    second with the subtraction of the maximum into one operation. P is rounded into the input format and
    enters the product unnormalised; the LSE is kept in base 2. Fewer than 128 queries run on another kernel
    ("flex decoding"), which splits the keys and merges in fp32. The backward sums dK and dV of grouped heads
    in fp32 and uses no atomics.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from flashcheck.adapters.torch_flex_backward import by_autograd, by_operator
from flashcheck.adapters.torch_flex_call import attend, widens, without_padding
from flashcheck.adapters.torch_products import sums_in_fp32
from flashcheck.arithmetic import Arithmetic, flash
from flashcheck.formats import FP32
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
        forward=_eager_forward,
        backward=by_operator,
        capabilities=EAGER_CAPABILITIES,
        arithmetic=eager_arithmetic,
        source=f"torch {torch.__version__} flex_attention, not compiled",
    )


def compiled_kernel() -> Kernel:
    """``torch.flex.compiled``: the Triton kernel that torch.compile makes of flex_attention."""
    return Kernel(
        name="torch.flex.compiled",
        forward=_compiled_forward,
        backward=lambda problem, out, lse: by_autograd(_run_compiled, problem, out, lse),
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
    """What the eager implementation does with this problem.

    Its derivative of a score_mod is traced on a score of the input format: where that widens the score, dS is
    rounded back into that format before it meets the scale.
    """
    fmt = problem.format
    return flash(
        fmt,
        normalise="before_product",
        scale_placement="scores",
        backward_probability="recomputed",
        grad_score_format=fmt if widens(problem) else FP32,
        scaled_grad_score_format=fmt,
        group_grad_format=fmt,
    )


def compiled_arithmetic(problem: Problem) -> Arithmetic:
    """What the compiled kernels do with this problem; their tiles are chosen by the compiler.

    Contracted or not, the exponent errs by no more than one operation that multiplies by log2 e and subtracts
    (``exponent_fma``) after two roundings of the score.
    """
    return flash(problem.format, scale_placement="exponent_fma", scale_roundings=2, score_roundings=2)


@sums_in_fp32()
def _eager_forward(problem: Problem) -> ForwardResult:
    p = without_padding(problem)
    with torch.no_grad():
        return ForwardResult(*attend(_uncompiled, p, p.q, p.k, p.v))


def _compiled_forward(problem: Problem) -> ForwardResult:
    """With inputs that ask for gradients, so that the backward finds what was compiled here."""
    p = without_padding(problem)
    with torch.enable_grad():
        out, lse = attend(_run_compiled, p, *(x.detach().requires_grad_() for x in (p.q, p.k, p.v)))
    return ForwardResult(out.detach(), lse.detach())
