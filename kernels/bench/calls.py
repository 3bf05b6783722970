"""One launch of one kernel with a given configuration, as a function without arguments."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from kernels.bench.candidates import APART
from kernels.hopper.backward_dkdv import launch_hopper_dk, launch_hopper_dkdv, launch_hopper_dv
from kernels.hopper.backward_dq import launch_hopper_dq
from kernels.hopper.forward import launch_hopper_forward, launch_hopper_products
from kernels.hopper.pipelined import launch_hopper_pipelined
from kernels.operands import Operands
from kernels.options import Options
from kernels.quantise import columns
from kernels.score_path import plain_path
from kernels.tuning import Tile

FP8_DTYPE = torch.float8_e4m3fn
# dout, q, k, v, lse, delta
Tensors = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


def call(
    kernel: str, tensors: Tensors, options: Options, tile: Tile, section: int | None = None
) -> Callable[[], tuple[Tensor, ...]]:
    """A launch of ``kernel``, a name of `kernels.bench.candidates`; results are laid out as the tensors are.

    Args:
        section: heads that run side by side, None for the default.
    """
    dout, q, k, v, lse, delta = tensors
    if kernel == "forward":
        return lambda: launch_hopper_forward(q, k, v, options, tile, section)
    if kernel.startswith("pipelined"):
        return _pipelined(kernel, q, k, v, options, tile, section)
    if kernel == "dkdv":
        return lambda: launch_hopper_dkdv(dout, q, k, v, lse, delta, options, tile, section)
    if kernel == "dq":
        return lambda: (launch_hopper_dq(dout, q, k, v, lse, delta, options, tile, section),)
    if kernel in APART:
        launch = launch_hopper_dk if kernel == "dk" else launch_hopper_dv
        return lambda: (launch(dout, q, k, v, lse, delta, options, tile, section),)
    if kernel == "packed":
        plain = plain_path(q.dtype)
        return _packed(
            q, k, v, options, partial(launch_hopper_products, path=plain, tile=tile, section=section)
        )
    operands, path = _fp8(q, k, v), plain_path(FP8_DTYPE)
    return lambda: launch_hopper_products(operands, options, path, tile, section)


def _fp8(q: Tensor, k: Tensor, v: Tensor) -> Operands:
    q, k, v = (x.to(FP8_DTYPE) for x in (q, k, v))
    return Operands(q, k, columns(v))


def _pipelined(
    kernel: str, q: Tensor, k: Tensor, v: Tensor, options: Options, tile: Tile, section: int | None
) -> Callable[[], tuple[Tensor, ...]]:
    """The kernel in Gluon, persistent or in turns as the name says."""
    launch = partial(
        launch_hopper_pipelined,
        path=plain_path(FP8_DTYPE if "fp8" in kernel else q.dtype),
        tile=tile,
        section=section,
        persistent="persistent" in kernel,
        turns="turns" in kernel,
    )
    if "packed" in kernel:
        return _packed(q, k, v, options, launch)
    return partial(launch, _fp8(q, k, v) if "fp8" in kernel else Operands(q, k, v), options)


def _packed(
    q: Tensor, k: Tensor, v: Tensor, options: Options, launch: Callable[..., tuple[Tensor, ...]]
) -> Callable[[], tuple[Tensor, ...]]:
    """The batch as segments of a batch of 1."""
    batch, heads, num_queries, dim = q.shape
    ends = [torch.arange(batch + 1, dtype=torch.int32, device=q.device) * x.shape[2] for x in (q, k)]
    packed = replace(
        options, cu_q=ends[0], cu_k=ends[1], segments=batch, longest_q=num_queries, longest_k=k.shape[2]
    )
    flat = [x.transpose(0, 1).flatten(1, 2)[None].contiguous() for x in (q, k, v)]

    def run() -> tuple[Tensor, ...]:
        out, lse = launch(Operands(flat[0], flat[1], flat[2]), packed)
        return (
            out.view(heads, batch, num_queries, dim).transpose(0, 1),
            lse.view(heads, batch, num_queries).transpose(0, 1),
        )

    return run
