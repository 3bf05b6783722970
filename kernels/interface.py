"""The functions that users call, and what the attention declares about itself."""

from __future__ import annotations

from typing import Any

import torch

from kernels import interpreter
from kernels.forward_kernel import launch_forward
from kernels.options import check_tensors, parse_options
from kernels.tuning import forward_tile

_ELEMENT_BYTES = {"fp16": 2, "bf16": 2, "fp32": 4}


def forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention output and log-sum-exp; takes the options of `flash_attention`, and is not differentiable.

    Returns:
        out: (batch, heads, Nq, value dim) in the inputs' dtype; a row that sees no key is 0.
        lse: (batch, heads, Nq) fp32, natural log of the sum of exp(score); -inf where no key is seen.
    """
    check_tensors(q, k, v)
    interpreter.repair()
    return launch_forward(q, k, v, parse_options(q, k, **options))


def flash_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    scale: float | None = None,
    causal: str | None = None,
    window: tuple[int | None, int | None] | None = None,
    mask: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    softcap: float | None = None,
    sink: torch.Tensor | None = None,
    key_lengths: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
    return_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """softmax(scale * q k^T) v, over the keys that each query sees.

    Args:
        q: (batch, heads, Nq, dim); fp16, bf16 or fp32; any strides, dim 1..256.
        k: (batch, kv heads, Nk, dim); heads is a multiple of kv heads, Nk may be 0.
        v: (batch, kv heads, Nk, value dim).
        scale: any finite number; 1/sqrt(dim) by default.
        causal: None, "top_left" (key j <= query i) or "bottom_right" (j <= i + Nk - Nq).
        return_lse: also return the log-sum-exp.

    Returns:
        out, or (out, lse); see `forward`.

    Raises:
        ValueError: an argument's value is illegal; NotImplementedError: the option is not supported yet.
    """
    out, lse = forward(
        q,
        k,
        v,
        scale=scale,
        causal=causal,
        window=window,
        mask=mask,
        bias=bias,
        alibi_slopes=alibi_slopes,
        softcap=softcap,
        sink=sink,
        key_lengths=key_lengths,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
    )
    return (out, lse) if return_lse else out


def arithmetic(
    dtype_name: str, head_dim: int, value_dim: int, num_queries: int, num_keys: int, device_type: str
) -> dict[str, Any]:
    """Where the forward rounds, for one problem, as plain data."""
    tile = forward_tile(device_type, _ELEMENT_BYTES[dtype_name], head_dim, value_dim, num_queries, num_keys)
    return {
        "probability_format": dtype_name,
        "score_format": None,
        "output_format": dtype_name,
        "lse_format": "fp32",
        "block_keys": tile.block_n,
        "order": "ascending",
        "row_sum": "unrounded",
        "scale_placement": "exponent_fma",
        "scale_roundings": 1,
    }


def _self_test() -> list[str]:
    interpreter.repair()
    return interpreter.self_test()


# Read by a checker that knows this module only by name; plain data and functions.
flash_attention.__flashcheck__ = {  # type: ignore[attr-defined]
    "name": "kernels:flash_attention",
    "forward": forward,
    "backward": None,
    "self_test": _self_test,
    "capabilities": {
        "dtypes": ["fp16", "bf16", "fp32"],
        "options": ["scale", "causal"],
        "causal": ["top_left", "bottom_right"],
        "head_dim": [1, 256],
        "value_dim_differs": True,
        "gqa": True,
        "lse": True,
        "empty_rows": True,
        "zero_length": True,
        "any_strides": True,
        "devices": ["cuda", "cpu"] if interpreter.interpreted() else ["cuda"],
        "deterministic": True,
    },
    "arithmetic": arithmetic,
}
