"""The functions that users call, and what the attention declares about itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from kernels import interpreter, orders
from kernels.hopper.calls import packed_by_name, simple_by_name
from kernels.launch import softmax_constants
from kernels.operators import differentiable_forward
from kernels.options import plain_sigma
from kernels.passes import run_backward, run_forward
from kernels.score_path import FP8, OPERAND_DTYPE, path_of
from kernels.tuning import (
    architecture,
    backward_tile,
    computed_apart,
    forward_tile,
    hopper_has,
    hopper_tile,
    mean_length,
)

_ELEMENT_BYTES = {"fp16": 2, "bf16": 2, "fp32": 4}


def forward(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    """Attention output and log-sum-exp; takes the options of `flash_attention`, and is not differentiable.

    Returns:
        out: (batch, heads, Nq, value dim) in the inputs' dtype; a row that sees no key is 0.
        lse: (batch, heads, Nq) fp32, natural log of the sum of exp(score), the sink's included; -inf where
        there is nothing to sum.
    """
    return run_forward(q, k, v, **options)


def backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    dlse: Tensor | None = None,
    **options: Any,
) -> dict[str, Tensor]:
    """Gradients of `flash_attention`, from what its forward returned.

    Args:
        dout: gradient of out; dlse: of lse, (batch, heads, Nq) fp32, or None for zero.
        out, lse: as `forward` returned them for the same q, k, v and options.

    Returns:
        "dq", "dk", "dv" in the shapes and dtype of q, k, v; "dbias" in the bias's shape and dtype and
        "dsink" (heads,) in the sink's dtype, where those are given.
    """
    return run_backward(dout, q, k, v, out, lse, dlse=dlse, **options)


def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None = None,
    causal: str | None = None,
    window: tuple[int | None, int | None] | None = None,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    softcap: float | None = None,
    sink: Tensor | None = None,
    key_lengths: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    score: str | None = None,
    score_scales: str | None = None,
    score_rows: int | None = None,
    hadamard: bool = False,
    promote: bool = True,
    allow_tf32: bool = False,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """softmax(softcap(scale * q k^T) + bias) v, over the keys that each query sees.

    Differentiable in q, k, v, bias and sink, through the log-sum-exp too; works under torch.compile.

    Args:
        q: (batch, heads, Nq, dim); fp16, bf16, fp32, float8_e4m3fn or float8_e5m2; any strides, dim 1..256.
        k: (batch, kv heads, Nk, dim); heads is a multiple of kv heads, Nk may be 0.
        v: (batch, kv heads, Nk, value dim).
        scale: any finite number; 1/sqrt(dim) by default.
        causal: None, "top_left" (key j <= query i) or "bottom_right" (j <= i + Nk - Nq).
        window: (left, right) keys around the same diagonal (bottom right where causal is None), both ends
            included; None on a side is no limit.
        mask: boolean, 4 dimensions, each 1 or that of (batch, heads, Nq, Nk); True where a key is seen.
        bias: added to the scaled, capped score; shaped like a mask. -inf hides a key.
        alibi_slopes: (heads,) or (batch, heads); adds -slope * |i + Nk - Nq - j|.
        softcap: c > 0, for c * tanh(score / c).
        sink: (heads,) logits that add exp(sink) to the denominator.
        key_lengths: (batch,) integers; keys past them are padding, which is never read.
        cu_seqlens_q, cu_seqlens_k: (segments + 1,) integers; sequences packed into a batch of 1, which see
            only themselves. Masks and biases then index the packed tensors.
        score: "fp16", "bf16", "tf32" (fp32 inputs only), "e4m3" or "e5m2": format in which q, k, v and the
            probabilities enter the two products of the forward, and q, k that of the recomputed scores in the
            backward; the backward's other products take their operands as given (fp8 as bf16). None: the
            inputs' own format. See README.md for where each path rounds.
        score_scales: with fp8 scores of wider inputs, what shares a scale: "tensor", "head" (the default) or
            "rows", blocks of ``score_rows`` rows of q and k (128 by default; v has one scale a head). Scales
            are powers of two.
        hadamard: rotate q and k before they are rounded to fp8, which spreads outliers over the dims.
        promote: add the fp8 product of each tile of keys to an fp32 sum; False leaves the whole sum to the
            matrix unit, which keeps 13 fraction bits of it on Hopper.
        allow_tf32: short for score="tf32" with fp32 inputs, without effect on others.
        return_lse: also return the log-sum-exp.

    Returns:
        out in the inputs' dtype (bf16 for fp8 inputs), or (out, lse); see `forward`.

    Raises:
        ValueError: an argument's value is illegal.
    """
    if alibi_slopes is not None and alibi_slopes.requires_grad:
        raise ValueError("alibi_slopes.requires_grad is True; it has no gradient here and must be detached")
    left, right = (None, None) if window is None else window
    out, lse = differentiable_forward(
        q,
        k,
        v,
        scale,
        causal,
        left,
        right,
        mask,
        bias,
        alibi_slopes,
        softcap,
        sink,
        key_lengths,
        cu_seqlens_q,
        cu_seqlens_k,
        score,
        score_scales,
        score_rows,
        hadamard,
        promote,
        allow_tf32,
    )
    return (out, lse) if return_lse else out


def arithmetic(
    dtype_name: str,
    head_dim: int,
    value_dim: int,
    num_queries: int,
    num_keys: int,
    device_type: str,
    *,
    options: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Where the kernels round, for one problem, as plain data; ``options``: of `flash_attention`."""
    options = options or {}
    sizes = (device_type, _ELEMENT_BYTES[dtype_name], head_dim, value_dim, num_queries, num_keys)
    data_mask = options.get("mask") is not None or options.get("bias") is not None
    simple, packed = simple_by_name(options), None
    if packed_by_name(options):
        packed = mean_length(num_keys, len(options["cu_seqlens_k"]) - 1)
    tile = forward_tile(*sizes, data_mask=data_mask, simple=simple, packed=packed)
    return {
        "probability_format": dtype_name,
        "grad_score_format": dtype_name,
        "score_format": None,
        "output_format": dtype_name,
        "lse_format": "fp32",
        "block_keys": tile.block_n,
        "block_queries": _block_queries(sizes, options),
        "order": "ascending",
        "row_sum": "unrounded",
        "scale_placement": "exponent_subtract_first" if dtype_name == "fp16" else "exponent_fma",
        "scale_roundings": 1,
    }


def _block_queries(sizes: tuple[str, int, int, int, int, int], options: Mapping[str, Any]) -> int | None:
    """Queries a tile of the backward; None where it depends on how the tensors lie in memory."""
    portable = backward_tile("dkdv", *sizes).block_m
    device_type, element_bytes, head_dim, value_dim, *_ = sizes
    on_hopper = architecture(device_type) == "sm90" and hopper_has(
        element_bytes, head_dim, value_dim, "backward"
    )
    if not (on_hopper and (simple_by_name(options) or packed_by_name(options))):
        return portable
    tiles = {
        hopper_tile(kernel, device_type, head_dim, banded, *sizes[4:])
        for banded in (False, True)
        for kernel in (("dk", "dv") if computed_apart(device_type, head_dim, banded) else ("dkdv",))
    }
    return portable if {tile.block_m for tile in tiles} == {portable} else None


def _self_test() -> list[str]:
    interpreter.repair()
    return interpreter.self_test()


# Read by a checker that knows this module only by name; plain data and functions.
flash_attention.__flashcheck__ = {  # type: ignore[attr-defined]
    "name": "kernels:flash_attention",
    "forward": forward,
    "backward": backward,
    "self_test": _self_test,
    "orders": {"launches": orders.launches} if interpreter.interpreted() else {},
    "capabilities": {
        "dtypes": ["fp16", "bf16", "fp32"],
        "options": [
            "scale",
            "causal",
            "window",
            "mask",
            "bias",
            "alibi_slopes",
            "softcap",
            "sink",
            "key_lengths",
            "cu_seqlens",
        ],
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
        "batch_invariant": True,
        "rejects_illegal": True,
        "gradients": ["dq", "dk", "dv", "dbias", "dsink"],
        "dlse": True,
    },
    "arithmetic": arithmetic,
}


def _declared(
    name: str, dtypes: tuple[str, ...], **path_options: Any
) -> Callable[..., Tensor | tuple[Tensor, Tensor]]:
    """`flash_attention` with a score path as a kernel of its own, so that it is judged by itself."""

    def kernel(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor | tuple[Tensor, Tensor]:
        return flash_attention(q, k, v, **path_options, **options)

    def path_forward(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
        return forward(q, k, v, **path_options, **options)

    def path_arithmetic(
        dtype_name: str, *sizes: Any, options: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        path = path_of(OPERAND_DTYPE[dtype_name], **path_options)
        tile = forward_tile(sizes[4], OPERAND_DTYPE[path.operand].itemsize, *sizes[:4])
        softmax = softmax_constants(path, sizes[0], plain_sigma(sizes[0], **(options or {})))
        return {
            "input_format": path.operand,
            "input_scale": path.scales or "none",
            "probability_format": path.operand,
            "probability_scale": path.probability_scale,
            "probability_scale_placement": "exponent" if softmax["LIFT"] else "product",
            "output_format": "bf16" if dtype_name in FP8 else dtype_name,
            "lse_format": "fp32",
            "block_keys": tile.block_n,
            "order": "ascending",
            "row_sum": "unrounded",
            "scale_placement": "exponent_subtract_first" if softmax["SUBTRACT_FIRST"] else "exponent_fma",
            "scale_roundings": 1,
        }

    declared = dict(flash_attention.__flashcheck__)  # type: ignore[attr-defined]
    # The backward multiplies in other formats than the forward, which the protocol cannot say yet.
    del declared["backward"]
    capabilities = {**declared["capabilities"], "dtypes": list(dtypes)}
    del capabilities["gradients"]
    capabilities.pop("dlse", None)
    # A NaN may be what a scale was taken from, and every other row then rounds otherwise.
    capabilities["isolates_nonfinite"] = "score_scales" not in path_options
    declared |= {"name": f"kernels:{name}", "capabilities": capabilities, "forward": path_forward}
    kernel.__flashcheck__ = {**declared, "arithmetic": path_arithmetic}  # type: ignore[attr-defined]
    kernel.__name__ = name
    what = ", ".join(f"{key}={value!r}" for key, value in path_options.items()) or f"{dtypes[0]} inputs"
    kernel.__doc__ = f"`flash_attention` with {what}, to be judged by itself."
    return kernel


flash_attention_e4m3 = _declared("flash_attention_e4m3", ("e4m3",))
flash_attention_e5m2 = _declared("flash_attention_e5m2", ("e5m2",))
score_fp16 = _declared("score_fp16", ("bf16", "fp32"), score="fp16")
score_bf16 = _declared("score_bf16", ("fp16", "fp32"), score="bf16")
score_tf32 = _declared("score_tf32", ("fp32",), score="tf32")
_WIDE = ("fp16", "bf16", "fp32")
score_e4m3 = _declared("score_e4m3", _WIDE, score="e4m3", score_scales="tensor")
score_e5m2 = _declared("score_e5m2", _WIDE, score="e5m2", score_scales="tensor")
