"""`flash_decode`: attention of a few queries over a cache of keys and values, paged or not; forward only."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kernels import interpreter, orders
from kernels.decode_kernel import MOST_SPLITS, launch_decode
from kernels.options import check_tensors, parse_options
from kernels.score_path import plain_path
from kernels.tuning import decode_tile

_ELEMENT_BYTES = {"fp16": 2, "bf16": 2, "fp32": 4}


def flash_decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    block_table: Tensor | None = None,
    key_lengths: Tensor | None = None,
    num_splits: int | None = None,
    scale: float | None = None,
    causal: str | None = None,
    window: tuple[int | None, int | None] | None = None,
    softcap: float | None = None,
    sink: Tensor | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """softmax(softcap(scale * q k^T)) v over the filled part of a cache; not differentiable.

    Keys are split among programs, so that one query keeps a whole GPU busy, and the parts are merged in a
    fixed order. Query heads that share a key/value head are computed together.

    Args:
        q: (batch, heads, Nq, dim); fp16, bf16, fp32 or fp8; Nq is usually 1, or a few speculated tokens.
        k_cache: (batch, kv heads, capacity, dim), or with a block table (pages, kv heads, page size, dim);
            any strides: a cache stored as (pages, page size, kv heads, dim) comes as ``.transpose(1, 2)``.
        v_cache: the same with v's dim.
        block_table: (batch, pages of one sequence) int32 or int64; entry (b, n) is the page of keys
            n * page size and up of sequence b. Entries past the sequence's length are not used.
        key_lengths: (batch,) int32 or int64, keys of each sequence; the whole capacity by default. What lies
            behind them, or in other pages, is not read.
        num_splits: shares of the keys, at least 1; by default what fills the GPU. Results differ in
            rounding between numbers of splits, not between runs.
        causal: None or "bottom_right": the last query is the last key of *its sequence*, so that diagonals
            follow ``key_lengths``, which here are the sequences' lengths (not padding, as in
            `flash_attention`).
        window: (left, right) keys around the same diagonal.
        scale, softcap, sink, return_lse: as in `flash_attention`.

    Returns:
        out (batch, heads, Nq, value dim), or (out, lse); a row without keys is 0 with log-sum-exp -inf.

    Raises:
        ValueError: an argument's value is illegal.
    """
    if causal not in (None, "bottom_right"):
        raise ValueError(f"causal is {causal!r}; it must be None or 'bottom_right'")
    if num_splits is not None and num_splits < 1:
        raise ValueError(f"num_splits is {num_splits}; it must be at least 1, or None")
    if block_table is None:
        check_tensors(q, k_cache, v_cache)
        batched = k_cache
    else:
        capacity = _check_table(block_table, q, k_cache)
        # Shapes as they would be without pages, strides of 0: nothing but their description is used.
        batched = k_cache[:1, :, :1].expand(q.shape[0], k_cache.shape[1], capacity, k_cache.shape[3])
        values = v_cache[:1, :, :1].expand(q.shape[0], v_cache.shape[1], capacity, v_cache.shape[3])
        check_tensors(q, batched, values)
        if v_cache.shape[0] != k_cache.shape[0] or v_cache.shape[2] != k_cache.shape[2]:
            got, expected = tuple(v_cache.shape), (k_cache.shape[0], k_cache.shape[2])
            raise ValueError(f"v_cache.shape is {got}; its pages and page size must be k_cache's, {expected}")
    options = parse_options(
        q,
        batched,
        scale=scale,
        causal=causal,
        window=window,
        softcap=softcap,
        sink=sink,
        key_lengths=key_lengths,
    )
    interpreter.repair()
    path = plain_path(q.dtype)
    out, lse = launch_decode(q, k_cache, v_cache, block_table, options, path, num_splits)
    return (out, lse) if return_lse else out


def _check_table(block_table: Tensor, q: Tensor, k_cache: Tensor) -> int:
    """Capacity in keys of a sequence; raises ValueError for a table that does not fit."""
    if k_cache.ndim != 4 or q.ndim != 4:
        raise ValueError(
            f"k_cache has {k_cache.ndim} dimensions; it must have 4: (pages, kv heads, page size, dim)"
        )
    good = block_table.ndim == 2 and block_table.shape[0] == q.shape[0]
    if not good or block_table.dtype not in (torch.int32, torch.int64) or block_table.device != q.device:
        got = f"{block_table.dtype} {tuple(block_table.shape)} on {block_table.device}"
        raise ValueError(
            f"block_table is {got}; it must be int32 or int64 ({q.shape[0]}, pages) on {q.device}"
        )
    if block_table.numel() and k_cache.shape[0] == 0:
        raise ValueError("k_cache.shape[0] is 0; a block table needs at least one page")
    return block_table.shape[1] * k_cache.shape[2]


def _forward(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    placed = orders.in_pages(k, v)
    if placed is not None:
        k, v, options["block_table"] = placed
    result = flash_decode(q, k, v, **options, return_lse=True)
    assert isinstance(result, tuple)
    return result


def _arithmetic(
    dtype_name: str, head_dim: int, value_dim: int, num_queries: int, num_keys: int, device_type: str
) -> dict[str, Any]:
    """Where the kernels round.

    How the keys are split follows the batch and the heads too, so that no tiling is declared, but the
    largest number of parts.
    """
    tile = decode_tile(device_type, _ELEMENT_BYTES[dtype_name], head_dim, value_dim, num_queries, num_keys)
    return {
        "probability_format": dtype_name,
        "output_format": dtype_name,
        "lse_format": "fp32",
        "order": "unknown",
        "row_sum": "unrounded",
        "scale_placement": "exponent_subtract_first" if dtype_name == "fp16" else "exponent_fma",
        "scale_roundings": 1,
        "splits": max(1, min(MOST_SPLITS, -(-num_keys // tile.block_n))),
    }


def _self_test() -> list[str]:
    interpreter.repair()
    return interpreter.self_test()


flash_decode.__flashcheck__ = {  # type: ignore[attr-defined]
    "name": "kernels:flash_decode",
    "forward": _forward,
    "self_test": _self_test,
    "orders": {
        "pages": orders.pages,
        **({"launches": orders.launches} if interpreter.interpreted() else {}),
    },
    "capabilities": {
        "dtypes": ["fp16", "bf16", "fp32"],
        "options": ["scale", "causal", "window", "softcap", "sink", "key_lengths"],
        "causal": ["bottom_right"],
        # Diagonals follow key_lengths, the lengths of the sequences; the contract counts them from Nk.
        "not_together": [("causal", "key_lengths"), ("window", "key_lengths")],
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
    "arithmetic": _arithmetic,
}
