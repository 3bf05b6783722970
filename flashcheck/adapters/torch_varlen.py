"""torch's ``torch.nn.attention.varlen.varlen_attn``: packed sequences on FlashAttention-2; CUDA only.

Tensors are (total length, heads, dim) with cumulative lengths; an ordinary batch is packed by the adapter.
Read from torch 2.13 (torch/nn/attention/varlen.py): causality is a window (-1, 0), counted from the bottom
right of each sequence; ``return_aux`` gives the LSE as (heads, total length), although the docstring says
the reverse. Arithmetic: that of ``torch.sdpa.cuda.flash``. A window that is open to the right hides keys
where the queries are many (golden/findings/016). Releases before ``scale`` and ``window_size`` declare less.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from flashcheck.adapters.given_forward import gradients_given
from flashcheck.adapters.grouped_heads import expanded_heads, summed_group
from flashcheck.adapters.optional import required
from flashcheck.adapters.torch_sdpa_cuda import FLASH_CAPABILITIES, flash_arithmetic
from flashcheck.kernel import Capabilities, ForwardResult, Kernel
from flashcheck.problem import Problem

_MODULE = "torch.nn.attention.varlen"


def varlen_kernel() -> Kernel:
    """``torch.varlen``."""
    install = "torch 2.10 or later"
    function, aux = required("torch.varlen", _MODULE, ("varlen_attn", "AuxRequest"), install)
    call = _Call(function, aux(lse=True), inspect.signature(function).parameters)
    return Kernel(
        name="torch.varlen",
        forward=call.forward,
        backward=call.backward,
        capabilities=call.capabilities(),
        arithmetic=flash_arithmetic,
        source=f"torch {torch.__version__} {_MODULE}.varlen_attn",
    )


class _Call:
    def __init__(
        self, function: Callable[..., Any], aux: Any, parameters: Mapping[str, inspect.Parameter]
    ) -> None:
        self.function, self.aux, self.parameters = function, aux, parameters

    def capabilities(self) -> Capabilities:
        has = {"scale": "scale", "window_size": "window"}
        more = tuple(option for key, option in has.items() if key in self.parameters)
        return replace(FLASH_CAPABILITIES, options=("causal", "cu_seqlens", *more))

    def forward(self, problem: Problem) -> ForwardResult:
        with torch.no_grad():
            out, lse = self._run(problem, *(_packed(x) for x in self._inputs(problem)))
        shape = (problem.num_heads, problem.batch, problem.num_queries)
        return ForwardResult(_unpacked(out, problem.batch), lse.reshape(shape).transpose(0, 1))

    def backward(self, problem: Problem, out: Tensor, lse: Tensor) -> Mapping[str, Tensor]:
        assert problem.dout is not None
        names = ("dq", "dk", "dv")
        packed = (_packed(x) for x in self._inputs(problem))
        found = gradients_given(
            lambda leaves: self._run(problem, *(leaves[name] for name in names)),
            dict(zip(names, packed, strict=True)),
            (_packed(out), lse.transpose(0, 1).reshape(problem.num_heads, -1)),
            [_packed(problem.dout)],
        )
        dq, dk, dv = (_unpacked(found[name], problem.batch) for name in names)
        if self._grouped(problem):
            return {"dq": dq, "dk": dk, "dv": dv}
        return {"dq": dq, "dk": summed_group(dk, problem.group), "dv": summed_group(dv, problem.group)}

    def _grouped(self, problem: Problem) -> bool:
        """The function takes fewer key/value heads itself."""
        return problem.group != 1 and "enable_gqa" in self.parameters

    def _inputs(self, problem: Problem) -> tuple[Tensor, Tensor, Tensor]:
        if self._grouped(problem):
            return problem.q, problem.k, problem.v
        return problem.q, *expanded_heads(problem)

    def _run(self, p: Problem, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """O (total, heads, dim) and LSE (heads, total)."""
        keywords: dict[str, Any] = {"return_aux": self.aux}
        if "scale" in self.parameters:
            keywords["scale"] = p.effective_scale
        if "window_size" in self.parameters:
            left, right = p.window if p.window is not None else (None, None)
            if p.causal is not None:
                right = 0 if right is None else min(right, 0)
            keywords["window_size"] = tuple(-1 if side is None else side for side in (left, right))
        elif p.causal is not None:
            keywords["is_causal"] = True
        if self._grouped(p):
            keywords["enable_gqa"] = True
        ends_q, most_q = _ends(p.cu_seqlens_q, p.batch, p.num_queries, q.device)
        ends_k, most_k = _ends(p.cu_seqlens_k, p.batch, p.num_keys, q.device)
        out, lse = self.function(q, k, v, ends_q, ends_k, most_q, most_k, **keywords)
        return out, lse


def _ends(given: Tensor | None, batch: int, length: int, device: torch.device) -> tuple[Tensor, int]:
    """Cumulative lengths as int32, and the longest."""
    if given is None:
        return torch.arange(batch + 1, dtype=torch.int32, device=device) * length, length
    return given.to(device=device, dtype=torch.int32), int(given.diff().max())


def _packed(x: Tensor) -> Tensor:
    """(batch, heads, length, dim) to (batch * length, heads, dim)."""
    return x.transpose(1, 2).flatten(0, 1)


def _unpacked(x: Tensor, batch: int) -> Tensor:
    """(batch * length, heads, dim) to (batch, heads, length, dim)."""
    return x.view(batch, -1, *x.shape[1:]).transpose(1, 2)
