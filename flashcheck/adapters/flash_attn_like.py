"""Any callable that follows flash-attn's convention: tensors (batch, length, heads, dim).

``f(q, k, v, *, softmax_scale=, causal=, window_size=(left, right), softcap=, alibi_slopes=,
return_attn_probs=)`` as flash-attn 2 has it; what the signature lacks is not declared. Causality and windows
count from the bottom right; -1 is an unlimited side. The result is ``out`` or a tuple whose second member
is the log-sum-exp.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch

from flashcheck.arithmetic import Arithmetic, flash
from flashcheck.kernel import Capabilities, ForwardResult, Kernel
from flashcheck.problem import Problem

_OPTION_OF = {
    "softmax_scale": "scale",
    "causal": "causal",
    "window_size": "window",
    "softcap": "softcap",
    "alibi_slopes": "alibi_slopes",
}


def follows_flash_attn(parameters: Mapping[str, object]) -> bool:
    """Whether a signature is flash-attn's: the names that torch does not use."""
    return "softmax_scale" in parameters and "causal" in parameters


def from_flash_attn_like(function: Callable[..., Any], name: str, *, source: str = "") -> Kernel:
    """A Kernel, forward alone, from a callable of flash-attn's convention."""
    parameters = inspect.signature(function).parameters
    lse_key = next((key for key in ("return_lse", "return_attn_probs") if key in parameters), None)
    capabilities = Capabilities(
        dtypes=("fp16", "bf16"),
        options=tuple(option for key, option in _OPTION_OF.items() if key in parameters),
        causal=("bottom_right",),
        head_dim=(8, 256),
        head_dim_multiple=8,
        gqa=True,
        lse=lse_key is not None,
        empty_rows=False,  # flash-attn gives such rows an LSE of +inf
        any_strides=False,
        isolates_nonfinite=False,
        deterministic=False,
    )

    def forward(problem: Problem) -> ForwardResult:
        keywords = _keywords(problem, parameters)
        if lse_key is not None:
            keywords[lse_key] = True
        with torch.no_grad():
            result = function(*(x.transpose(1, 2) for x in (problem.q, problem.k, problem.v)), **keywords)
        out, lse = (result[0], result[1]) if isinstance(result, tuple) else (result, None)
        return ForwardResult(out.transpose(1, 2), lse)

    return Kernel(
        name=name, forward=forward, capabilities=capabilities, arithmetic=_arithmetic, source=source
    )


def _arithmetic(problem: Problem) -> Arithmetic:
    """Scale and log2 e are multiplied in fp32 before they meet the scores: two roundings."""
    return flash(problem.format, scale_roundings=2)


def _keywords(problem: Problem, parameters: Mapping[str, object]) -> dict[str, Any]:
    p = problem
    keywords: dict[str, Any] = {"softmax_scale": p.effective_scale, "causal": p.causal is not None}
    if "window_size" in parameters and p.window is not None:
        keywords["window_size"] = tuple(-1 if side is None else side for side in p.window)
    if p.softcap is not None:
        keywords["softcap"] = p.softcap
    if p.alibi_slopes is not None:
        keywords["alibi_slopes"] = p.alibi_slopes
    return keywords
