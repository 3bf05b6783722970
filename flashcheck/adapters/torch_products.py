"""torch's products of 16-bit matrices on CUDA, summed in fp32 from end to end.

By default cuBLAS may cut a sum into parts and round each into 16 bits (pytorch's notes on numerical accuracy,
"Reduced Precision Reduction"; golden/findings/023). How many parts is not said, so no bound can be.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

FLAGS = ("allow_fp16_reduced_precision_reduction", "allow_bf16_reduced_precision_reduction")
"""Of ``torch.backends.cuda.matmul``; they are the process's."""


@contextmanager
def sums_in_fp32() -> Iterator[None]:
    """Switches the flags off and back to what they were; usable as a decorator."""
    flags: Any = torch.backends.cuda.matmul
    before = {name: (getattr(flags, name), getattr(flags, f"{name}_split_k")) for name in FLAGS}
    for name, (_, split_k) in before.items():
        setattr(flags, name, (False, split_k))
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(flags, name, value)
