"""The stored bits of a tensor, whatever its strides."""

from __future__ import annotations

import torch
from torch import Tensor

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits_of(x: Tensor) -> Tensor:
    """Integers of the element's own size with the same bits, shape of ``x``; a view where torch allows it.

    Not a view as bytes: torch makes one of a last stride of 1 only, and a dimension of extent 1 may have
    any stride and still count as contiguous. Raises KeyError for elements of another size (complex128).
    """
    return x.contiguous().view(_INTEGERS[x.element_size()])


def bytes_of(x: Tensor) -> bytes:
    """The bytes of all elements, row-major, in the machine's own order."""
    return bits_of(x.detach().cpu()).numpy().tobytes()
