"""The backward faults; the forward of these mutants is the control's."""

from __future__ import annotations

from collections.abc import Callable

import torch

from flashcheck.formats import BF16, FP16
from flashcheck.mutants import exposing as x
from flashcheck.mutants.registry import register
from flashcheck.problem import Problem


def _backward(
    name: str, letter: str, fault: str, exposed_by: str, expose: Callable[[], Problem], source: str = ""
) -> None:
    register(name, letter, fault, exposed_by, expose, source=source, caught_by="backward.bound")


def _with_lse_gradient() -> Problem:
    p = x.draw()
    g = torch.Generator().manual_seed(3)
    return p.replaced(dlse=torch.randn(1, 2, 37, generator=g))


def _transposed_dout() -> Problem:
    """dO stored as (batch, length, heads, dim)."""
    p = x.draw()
    g = torch.Generator().manual_seed(3)
    return p.replaced(dout=torch.randn(1, 37, 2, 16, generator=g).to(p.q.dtype).transpose(1, 2))


_backward(
    "bwd-causal-top-left",
    "C",
    "the backward leaves the offset Nk - Nq out of the causal rule; the forward is right",
    "Nq != Nk, bottom right",
    lambda: x.draw(lengths=(33, 64), causal="bottom_right"),
    "ffpa-attn#300",
)
_backward(
    "bwd-key-tail-zero",
    "E",
    "columns past Nk are not masked in the recomputed P",
    "Nk not a multiple of the tile, all scores shifted to -120",
    lambda: x.shifted(-120.0),
    "pytorch#196678, aiter#3551",
)
_backward(
    "bwd-mask-ignored", "L", "the backward does not apply the mask", "a mask", x.masked, "pytorch#102038"
)
_backward(
    "bwd-window-one-extra",
    "D",
    "the backward's window reaches one key further left",
    "a window of 1",
    lambda: x.draw(lengths=(40, 40), window=(1, 0)),
    "transformers#39408",
)
_backward(
    "bwd-first-tile-lost", "E", "the backward never visits the first key tile", "several key tiles", x.draw
)
_backward(
    "bwd-dq-rows-uncovered",
    "E",
    "trailing rows of dQ are never computed",
    "Nq not a multiple of the tile",
    x.draw,
    "FlagGems#3395, triton#1975",
)
_backward(
    "bwd-dout-assumed-contiguous",
    "H",
    "dO is read as if it were contiguous",
    "dO stored as (batch, length, heads, dim)",
    _transposed_dout,
    "flash-attention#355, xformers#282",
)
_backward(
    "bwd-gqa-tiled-heads",
    "I",
    "the backward reads key head h mod Hkv",
    "H=4, Hkv=2",
    lambda: x.draw(heads=(4, 2)),
    "onnx#7274",
)
_backward(
    "bwd-group-not-summed",
    "I",
    "each query head overwrites dK and dV instead of adding",
    "H=4, Hkv=2",
    lambda: x.draw(heads=(4, 2)),
    "levanter#449",
)
_backward(
    "bwd-group-averaged",
    "I",
    "dK and dV are averaged over a group instead of summed",
    "H=4, Hkv=2",
    lambda: x.draw(heads=(4, 2)),
)
_backward(
    "bwd-lse-gradient-dropped",
    "J",
    "the gradient of the log-sum-exp is not used",
    "a gradient of the log-sum-exp",
    _with_lse_gradient,
    "flash-attention#889, flash-attention#404",
)
_backward(
    "bwd-lse-gradient-sign",
    "J",
    "the gradient of the log-sum-exp has the wrong sign",
    "a gradient of the log-sum-exp",
    _with_lse_gradient,
)
_backward("bwd-lse-read-as-base-2", "J", "the stored log-sum-exp is taken for base 2", "any input", x.draw)
_backward(
    "bwd-lse-bf16",
    "P",
    "the log-sum-exp is rounded to bf16 before the backward uses it",
    "scores shifted to +200",
    lambda: x.shifted(200.0),
    "tt-metal#41683",
)
_backward("bwd-no-delta", "J", "rowsum(dO * O) is not subtracted", "any input", x.draw)
_backward("bwd-delta-bf16", "P", "rowsum(dO * O) is rounded to bf16", "fp16", lambda: x.draw(FP16))
_backward(
    "bwd-delta-first-tile",
    "F",
    "rowsum(dO * O) covers the first 16 columns only",
    "value dim above 16",
    lambda: x.draw(dims=(32, 32)),
)
_backward(
    "bwd-value-extent",
    "F",
    "dP takes the width of q for that of V",
    "value dim above the head dim",
    lambda: x.draw(dims=(32, 48)),
    "native-sparse-attention-triton#27",
)
_backward(
    "bwd-cap-derivative-missing",
    "K",
    "the factor 1 - tanh^2 is left out",
    "scores of several times the cap",
    lambda: x.draw(softcap=1.0, scale=1.0),
    "tokamax#1121, flash-attention#2402",
)
_backward(
    "bwd-cap-derivative-capped-twice",
    "K",
    "the cap's derivative is taken at the capped score",
    "scores near the cap",
    lambda: x.draw(softcap=1.0, scale=1.0),
)
_backward("bwd-bias-left-out", "L", "the backward recomputes scores without the bias", "a bias", x.biased)
_backward(
    "bwd-dbias-not-reduced",
    "L",
    "one slice of the bias gradient is written instead of the sum over broadcast dimensions",
    "a bias of shape (1, H, 1, Nk)",
    lambda: x.biased(heads=2),
    "flash-sparse-attention#190",
)
_backward("bwd-dk-unscaled", "S", "the scale is not applied to dK", "scale other than 1", x.draw)
_backward("bwd-dq-scaled-twice", "S", "the scale is applied to dQ twice", "scale other than 1", x.draw)
_backward("bwd-p-e4m3", "P", "P is rounded to 8 bits before dV, undeclared", "16 bits", lambda: x.draw(FP16))
_backward("bwd-ds-e4m3", "P", "dS is rounded to 8 bits, undeclared", "16 bits", lambda: x.draw(FP16))
_backward(
    "bwd-sums-bf16",
    "P",
    "dQ is kept in bf16 from key tile to key tile, undeclared",
    "many key tiles",
    lambda: x.draw(BF16, lengths=(32, 256)),
)
_backward(
    "bwd-empty-row-no-guard",
    "A",
    "exp(-inf - -inf) in rows that see nothing",
    "causal, bottom right, Nq > Nk",
    lambda: x.draw(lengths=(80, 48), causal="bottom_right"),
    "burn#4694",
)
_backward(
    "bwd-dsink-sign", "V", "the sink's gradient has the wrong sign", "a sink", lambda: x.with_sink((1.0, 3.0))
)
