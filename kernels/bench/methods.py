"""The attentions that are timed: ours and what users would pick instead, all called alike."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from kernels.interface import flash_attention

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
OURS, CUDNN, FLASH2, FLEX, EAGER = "ours", "cuDNN", "FlashAttention-2", "flex_attention", "eager"
RIVALS = (CUDNN, FLASH2, FLEX)
_SDPA = {CUDNN: SDPBackend.CUDNN_ATTENTION, FLASH2: SDPBackend.FLASH_ATTENTION}


def attention(name: str, causal: bool, length: int, device: str) -> Attention:
    """The differentiable function (q, k, v) -> out of a method; square problems, causal or not."""
    if name == OURS:

        def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            out = flash_attention(q, k, v, causal="top_left" if causal else None)
            assert isinstance(out, Tensor)
            return out

        return ours
    if name == EAGER:
        return _eager(causal)
    if name == FLEX:
        return _flex(causal, length, device)

    def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(_SDPA[name]):
            return scaled_dot_product_attention(q, k, v, is_causal=causal)

    return sdpa


def _eager(causal: bool) -> Attention:
    """What one writes first: every score in memory."""

    def eager(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = q @ k.mT * q.shape[3] ** -0.5
        if causal:
            hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
            scores = scores.masked_fill(hidden, -torch.inf)
        out: Tensor = scores.softmax(-1) @ v
        return out

    return eager


@cache
def _block_mask(length: int, device: str) -> Any:
    from torch.nn.attention.flex_attention import create_block_mask

    return create_block_mask(lambda _b, _h, i, j: i >= j, None, None, length, length, device=device)


def _flex(causal: bool, length: int, device: str) -> Attention:
    """Compiled for this shape alone; gradients may be taken of one output again and again."""
    from torch._functorch import config
    from torch.nn.attention.flex_attention import flex_attention

    config.donated_buffer = False
    torch._dynamo.reset()  # a shape is a new compilation, and their number per function is limited
    compiled: Any = torch.compile(flex_attention, dynamic=False)
    mask = _block_mask(length, device) if causal else None
    return lambda q, k, v: compiled(q, k, v, block_mask=mask)
