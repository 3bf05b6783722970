"""Stand-ins for libraries that need a GPU: their true signatures, layouts and results, by the formula.

Signatures as of flash-attention 0251105, flash-attn-4 4.0.0b36, xformers bed3978, flashinfer fb28d72. What a
library asserts of its arguments its stand-in asserts too. ``MODULES`` is what to put into ``sys.modules``.
"""

# ruff: noqa: ARG001, ARG004 - the signatures are the libraries'
from __future__ import annotations

import math
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from tests.adapters import formula
from tests.adapters.formula import Options


class Flash(torch.autograd.Function):
    """(batch, length, heads, dim); keeps O and LSE for its backward as all flash-attn releases do."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, options: Options) -> Any:  # type: ignore[override]
        assert q.stride(-1) == 1
        assert q.shape[2] % k.shape[2] == 0
        pad = -q.shape[-1] % 8  # flash-attn 2 pads head dims, and keeps the padded O
        out, lse = formula.forward(*(x.transpose(1, 2) for x in (q, k, v)), options)
        out_padded = torch.nn.functional.pad(out.transpose(1, 2), [0, pad])
        ctx.save_for_backward(q, k, v, out_padded, lse)
        ctx.options, ctx.dim = options, q.shape[-1]
        ctx.set_materialize_grads(False)
        return out_padded[..., : q.shape[-1]], lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor, dlse: Tensor | None) -> Any:  # type: ignore[override]
        q, k, v, out, lse = ctx.saved_tensors
        tensors = (x.transpose(1, 2) for x in (q, k, v, out[..., : ctx.dim]))
        q_, k_, v_, out_ = tensors
        found = formula.backward(q_, k_, v_, out_, lse, dout.transpose(1, 2), ctx.options, dlse)
        dsink = None if ctx.options.sink is None else found[3].to(ctx.options.sink.dtype)
        return (*(x.transpose(1, 2) for x in found[:3]), dsink, None)


def flash_attn_2_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    assert dropout_p == 0.0
    assert alibi_slopes is None or alibi_slopes.dtype == torch.float32
    left, right = (None if side < 0 else side for side in window_size)
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    options = Options(scale, causal, left, right, cap=softcap, slopes=alibi_slopes)
    out, lse = Flash.apply(q, k, v, None, options)
    lse = torch.where(lse.isneginf(), torch.inf, lse) if bool(lse.isneginf().any()) else lse
    return (out, lse, None) if return_attn_probs else out


def flash_attn_3_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Any:
    left, right = (None if side < 0 else side for side in window_size)
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    out, lse = Flash.apply(q, k, v, None, Options(scale, causal, left, right, cap=softcap))
    return (out, lse) if return_attn_probs else out


def flash_attn_4_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    qv: Tensor | None = None,
    gather_kv_indices: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = (None, None),
    learnable_sink: Tensor | None = None,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    score_mod: Any = None,
    score_mod_bwd: Any = None,
    mask_mod: Any = None,
    aux_tensors: list[Tensor] | None = None,
    aux_scalars: tuple[Any, ...] | None = None,
    block_sparse_tensors: Any = None,
    block_sparse_tensors_bwd: Any = None,
    return_lse: bool = False,
    gather_bwd_recompute_p: bool = False,
    gather_bwd_token_chunk: int | None = None,
) -> Any:
    assert None in window_size or all(side >= 0 for side in window_size if side is not None)
    assert learnable_sink is None or learnable_sink.shape == (q.shape[2],)
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    sink = None if learnable_sink is None else learnable_sink.detach()
    options = Options(scale, causal, *window_size, cap=softcap, sink=sink)
    return Flash.apply(q, k, v, learnable_sink, options)


class LowerTriangularMask:
    top_left = True


class LowerTriangularFromBottomRightMask:
    top_left = False


def _xformers_options(bias: Any, scale: float | None, q: Tensor) -> Options:
    assert q.ndim == 4
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    return Options(scale, causal=bias is not None, top_left=bias is not None and bias.top_left)


def memory_efficient_attention_forward_requires_grad(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Any = None,
    p: float = 0.0,
    scale: float | None = None,
    *,
    op: Any = None,
    output_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    assert query.shape[2] == key.shape[2]  # heads are not repeated for the caller
    assert op.direction == "forward"
    assert op.name == "cutlass" or attn_bias is None or not attn_bias.top_left
    options = _xformers_options(attn_bias, scale, query)
    out, lse = formula.forward(*(x.transpose(1, 2) for x in (query, key, value)), options)
    if op.name == "cutlass":
        lse = torch.nn.functional.pad(lse, [0, -lse.shape[-1] % 32], value=math.inf)
    return out.transpose(1, 2), lse


def memory_efficient_attention_backward(
    grad: Tensor,
    output: Tensor,
    lse: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Any = None,
    p: float = 0.0,
    scale: float | None = None,
    *,
    op: Any = None,
) -> tuple[Tensor, Tensor, Tensor]:
    assert op.direction == "backward"
    assert lse.shape[:2] == (query.shape[0], query.shape[2])
    options = _xformers_options(attn_bias, scale, query)
    q, k, v, out, dout = (x.transpose(1, 2) for x in (query, key, value, output, grad))
    dq, dk, dv, _ = formula.backward(q, k, v, out, lse, dout, options)
    return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)


def single_prefill_with_kv_cache(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale_q: Tensor | None = None,
    scale_k: Tensor | None = None,
    scale_v: Tensor | None = None,
    o_dtype: torch.dtype | None = None,
    custom_mask: Tensor | None = None,
    packed_custom_mask: Tensor | None = None,
    causal: bool = False,
    kv_layout: str = "NHD",
    pos_encoding_mode: str = "NONE",
    use_fp16_qk_reduction: bool = False,
    sm_scale: float | None = None,
    window_left: int = -1,
    logits_soft_cap: float | None = None,
    rope_scale: float | None = None,
    rope_theta: float | None = None,
    backend: str = "auto",
    return_lse: bool = False,
    kv_cache_sf: Any = None,
    k_scale: float | None = None,
    v_scale: float | None = None,
) -> Any:
    assert kv_layout == "NHD"
    assert custom_mask is None or custom_mask.shape == (q.shape[0], k.shape[0])
    scale = q.shape[-1] ** -0.5 if sm_scale is None else sm_scale
    causal = causal and custom_mask is None  # "only effective when custom_mask is not provided"
    options = Options(scale, causal, mask=custom_mask, cap=logits_soft_cap or 0.0)
    out, lse = formula.forward(*(x.transpose(0, 1).unsqueeze(0) for x in (q, k, v)), options)
    base_two = (lse[0].double() / math.log(2)).float()
    return (out[0].transpose(0, 1), base_two.transpose(0, 1)) if return_lse else out[0].transpose(0, 1)


def _module(name: str, **attributes: object) -> ModuleType:
    module = ModuleType(name)
    module.__path__ = []
    vars(module).update(attributes)
    return module


def _operators(name: str) -> tuple[SimpleNamespace, ...]:
    return tuple(SimpleNamespace(name=name, direction=d) for d in ("forward", "backward"))


_XFORMERS_OPS = _module(
    "xformers.ops",
    memory_efficient_attention_forward_requires_grad=memory_efficient_attention_forward_requires_grad,
    memory_efficient_attention_backward=memory_efficient_attention_backward,
    LowerTriangularMask=LowerTriangularMask,
    MemoryEfficientAttentionFlashAttentionOp=_operators("flash"),
    MemoryEfficientAttentionCutlassOp=_operators("cutlass"),
)

_XFORMERS = {
    "xformers": _module("xformers"),
    "xformers.ops": _XFORMERS_OPS,
    "xformers.ops.fmha": _module("xformers.ops.fmha"),
    "xformers.ops.fmha.attn_bias": _module(
        "xformers.ops.fmha.attn_bias", LowerTriangularFromBottomRightMask=LowerTriangularFromBottomRightMask
    ),
}

MODULES: dict[str, dict[str, ModuleType]] = {
    "flash_attn.2": {"flash_attn": _module("flash_attn", flash_attn_func=flash_attn_2_func)},
    "flash_attn.3": {
        "flash_attn_interface": _module("flash_attn_interface", flash_attn_func=flash_attn_3_func)
    },
    "flash_attn.4": {
        "flash_attn": _module("flash_attn"),
        "flash_attn.cute": _module("flash_attn.cute", flash_attn_func=flash_attn_4_func),
    },
    "flashinfer.single_prefill": {
        "flashinfer": _module("flashinfer", single_prefill_with_kv_cache=single_prefill_with_kv_cache)
    },
    "xformers.flash": _XFORMERS,
    "xformers.cutlass": _XFORMERS,
}
