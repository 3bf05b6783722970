"""The call of torch's ``flex_attention``: a problem's options as its mask_mod and score_mod."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flashcheck.problem import Problem

_LONGEST_DECODED = 128


def attend(
    attention: Callable[..., Any], p: Problem, q: Tensor, k: Tensor, v: Tensor
) -> tuple[Tensor, Tensor]:
    """O and the natural LSE of ``attention`` (flex_attention in some form) on ``p`` with other tensors."""
    from torch.nn.attention.flex_attention import AuxRequest

    chosen = kernel_options(p)
    options = {"kernel_options": chosen} if chosen else {}
    out, aux = attention(
        q,
        k,
        v,
        score_mod=score_mod_of(p),
        block_mask=block_mask_of(p),
        scale=p.effective_scale,
        enable_gqa=p.group != 1,
        return_aux=AuxRequest(lse=True),
        **options,
    )
    return out, aux.lse


def kernel_options(p: Problem) -> dict[str, Any]:
    """What torch 2.11 needs to be told to compile at all; it raises otherwise and says so itself."""
    options: dict[str, Any] = {}
    if _too_many_rows(p):
        options["FORCE_USE_FLEX_ATTENTION"] = True
    # Tiles are chosen by q's head dim alone; a wider v, and what the mods load for each pair, can then need
    # more shared memory than a Hopper GPU has.
    if p.value_dim > p.head_dim or p.mask is not None or p.bias is not None:
        options |= {"fwd_num_stages": 1, "bwd_num_stages": 1}
    return options


def _too_many_rows(p: Problem) -> bool:
    """Flex decoding takes the rows of a group as one tile, for which a block mask leaves at most 128:
    past that torch 2.11 finds no kernel and raises (pytorch/pytorch#185349)."""
    return p.group != 1 and _LONGEST_DECODED // p.group < p.num_queries < _LONGEST_DECODED


def score_mod_of(problem: Problem) -> Callable[..., Tensor] | None:
    """softcap(score) + bias + ALiBi, in the contract's order; None where nothing is added."""
    p = problem
    cap, bias, alibi = p.softcap, p.bias, p.alibi_slopes
    if cap is None and bias is None and alibi is None:
        return None
    offset = p.num_keys - p.num_queries

    def score_mod(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        if widens(p):
            score = score.float()
        if cap is not None:
            score = cap * torch.tanh(score / cap)
        if bias is not None:
            score = score + _at(bias, b, h, i, j).float()
        if alibi is not None:
            slope = alibi[b, h] if alibi.dim() == 2 else alibi[h]
            score = score - slope * (i + offset - j).abs()
        return score

    return score_mod


def widens(p: Problem) -> bool:
    """The score_mod adds fp32 terms to a score that torch traces in the input format: it widens it first, so
    that its derivative ends with one rounding into that format, and does not begin with it."""
    return p.bias is not None or p.alibi_slopes is not None


def without_padding(p: Problem) -> Problem:
    """Padding may hold anything; here it is data that a mask hides, which must be finite: zeros."""
    if p.key_lengths is None:
        return p
    padding = torch.arange(p.num_keys, device=p.k.device) >= p.key_lengths.unsqueeze(-1)
    hidden = padding[:, None, :, None]
    return p.replaced(k=p.k.masked_fill(hidden, 0.0), v=p.v.masked_fill(hidden, 0.0))


def block_mask_of(problem: Problem) -> Any:
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
