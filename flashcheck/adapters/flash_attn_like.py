"""Any callable that follows flash-attn's convention: tensors (batch, length, heads, dim).

``f(q, k, v, *, softmax_scale=, causal=, window_size=(left, right), softcap=, alibi_slopes=, learnable_sink=,
return_attn_probs= or return_lse=)``; what the signature lacks is not declared. Causality and windows count
from the bottom right; an unlimited side is what the signature has for a default (-1, or None). The result is
``out`` or a tuple whose second member is the natural log-sum-exp, (batch, heads, length).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from flashcheck.adapters.given_forward import gradients_given
from flashcheck.arithmetic import Arithmetic, flash
from flashcheck.kernel import Capabilities, ForwardResult, Kernel
from flashcheck.problem import Problem

_OPTION_OF = {
    "softmax_scale": "scale",
    "causal": "causal",
    "window_size": "window",
    "softcap": "softcap",
    "alibi_slopes": "alibi_slopes",
    "learnable_sink": "sink",
}


def follows_flash_attn(parameters: Mapping[str, object]) -> bool:
    """Whether a signature is flash-attn's: the names that torch does not use."""
    return "softmax_scale" in parameters and "causal" in parameters


def from_flash_attn_like(function: Callable[..., Any], name: str, *, source: str = "") -> Kernel:
    """A Kernel, forward alone, from a callable of flash-attn's convention."""
    parameters = inspect.signature(function).parameters
    call = _Call(function, parameters)
    capabilities = Capabilities(
        dtypes=("fp16", "bf16"),
        options=tuple(option for key, option in _OPTION_OF.items() if key in parameters),
        causal=("bottom_right",),
        head_dim=(8, 256),
        head_dim_multiple=8,
        gqa=True,
        lse=call.lse_key is not None,
        empty_rows=False,  # flash-attn 2 gives such rows an LSE of +inf
        any_strides=False,
        isolates_nonfinite=False,
        deterministic=False,
        # Hidden scores are -inf before they meet the scale: -inf * 0 is NaN.
        nonpositive_scale=False,
    )
    return Kernel(
        name=name, forward=call.forward, capabilities=capabilities, arithmetic=usual_arithmetic, source=source
    )


def differentiated(kernel: Kernel, function: Callable[..., Any]) -> Kernel:
    """``kernel``, made by ``from_flash_attn_like``, with the backward of the same function."""
    return replace(kernel, backward=_Call(function, inspect.signature(function).parameters).backward)


def usual_arithmetic(problem: Problem) -> Arithmetic:
    """Scale and log2 e are multiplied in fp32 before they meet the scores: two roundings."""
    return flash(problem.format, scale_roundings=2)


class _Call:
    """One function of the convention, with the problem's tensors and options in its layout and names."""

    def __init__(self, function: Callable[..., Any], parameters: Mapping[str, inspect.Parameter]) -> None:
        self.function, self.parameters = function, parameters
        keys = ("return_lse", "return_attn_probs")
        self.lse_key = next((key for key in keys if key in parameters), None)

    def forward(self, problem: Problem) -> ForwardResult:
        import torch

        with torch.no_grad():
            out, lse = self.run(problem, *(x.transpose(1, 2) for x in (problem.q, problem.k, problem.v)))
        return ForwardResult(out.transpose(1, 2), lse)

    def backward(self, problem: Problem, out: Tensor, lse: Tensor) -> Mapping[str, Tensor]:
        """Gradients given O and LSE; of the sink too where there is one."""
        assert problem.dout is not None
        inputs = {f"d{name}": getattr(problem, name).transpose(1, 2) for name in ("q", "k", "v")}
        if problem.sink is not None:
            inputs["dsink"] = problem.sink

        def call(leaves: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
            result, own = self.run(problem, leaves["dq"], leaves["dk"], leaves["dv"], leaves.get("dsink"))
            assert own is not None
            return result, own

        outputs = [problem.dout.transpose(1, 2)] + ([] if problem.dlse is None else [problem.dlse])
        found = gradients_given(call, inputs, (out.transpose(1, 2), lse), outputs)
        return {name: x if name == "dsink" else x.transpose(1, 2) for name, x in found.items()}

    def run(
        self, problem: Problem, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """O (batch, length, heads, dim) and LSE (batch, heads, length) of tensors in that layout."""
        keywords = self.keywords(problem)
        if problem.sink is not None:
            keywords["learnable_sink"] = problem.sink if sink is None else sink
        if self.lse_key is not None:
            keywords[self.lse_key] = True
        result = self.function(q, k, v, **keywords)
        return (result[0], result[1]) if isinstance(result, tuple) else (result, None)

    def keywords(self, p: Problem) -> dict[str, Any]:
        keywords: dict[str, Any] = {"softmax_scale": p.effective_scale, "causal": p.causal is not None}
        if "window_size" in self.parameters and p.window is not None:
            keywords["window_size"] = tuple(self._unlimited if side is None else side for side in p.window)
        if p.softcap is not None:
            keywords["softcap"] = p.softcap
        if p.alibi_slopes is not None:
            keywords["alibi_slopes"] = p.alibi_slopes
        return keywords

    @property
    def _unlimited(self) -> int | None:
        default = self.parameters["window_size"].default
        return default[0] if isinstance(default, tuple) else -1
