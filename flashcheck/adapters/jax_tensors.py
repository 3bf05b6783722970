"""Tensors between torch and JAX by DLPack, on the device where they lie; JAX imported as adapters need it.

Both libraries work on streams of their own, and each frees memory without asking the other. DLPack orders
the streams when a tensor is handed over; what is left is done here: JAX has finished before its result is
read and before the inputs may be freed, and the copy of a result is finished before JAX may free that.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

PREALLOCATE = "XLA_PYTHON_CLIENT_PREALLOCATE"

_KEPT = 256
"""Shapes whose programs JAX may keep. It forgets none by itself, at some megabytes for a problem."""
_shapes: set[tuple[torch.Size, torch.dtype]] = set()


def import_jax() -> Any:
    """The module; before its first import, unless the user has set the variable, it is told not to take three
    quarters of a GPU's memory at once: torch's tensors, and other processes, need some."""
    os.environ.setdefault(PREALLOCATE, "false")
    import jax

    return jax


def to_jax(x: Tensor) -> Any:
    """A copy in row-major order: whatever JAX does, ``x`` stays as it is, and its strides do not matter."""
    jax = import_jax()
    _shapes.add((x.shape, x.dtype))
    if len(_shapes) > _KEPT:
        jax.clear_caches()
        _shapes.clear()
    copy = x.detach().clone(memory_format=torch.contiguous_format)
    return jax.dlpack.from_dlpack(copy)


def to_torch(x: Any) -> Tensor:
    """A copy that torch owns."""
    x.block_until_ready()
    copy: Tensor = from_dlpack(x).clone()
    if copy.is_cuda:
        torch.cuda.current_stream(copy.device).synchronize()
    return copy
