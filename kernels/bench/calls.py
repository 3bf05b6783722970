"""One launch of one kernel of kernels/hopper with a given configuration, as a function without arguments."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from kernels.hopper.backward_dkdv import launch_hopper_dkdv
from kernels.hopper.backward_dq import launch_hopper_dq
from kernels.hopper.forward import launch_hopper_forward
from kernels.options import Options
from kernels.tuning import Tile

# dout, q, k, v, lse, delta
Tensors = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


def call(
    kernel: str, tensors: Tensors, options: Options, tile: Tile, section: int | None = None
) -> Callable[[], tuple[Tensor, ...]]:
    """Args: kernel: "forward", "dkdv" or "dq"; section: heads that run side by side, None for the default."""
    dout, q, k, v, lse, delta = tensors
    if kernel == "forward":
        return lambda: launch_hopper_forward(q, k, v, options, tile, section)
    if kernel == "dkdv":
        return lambda: launch_hopper_dkdv(dout, q, k, v, lse, delta, options, tile, section)
    return lambda: (launch_hopper_dq(dout, q, k, v, lse, delta, options, tile, section),)
