"""Flash attention in Triton: one source for GPUs and for the interpreter (``TRITON_INTERPRET=1``)."""

from kernels.interface import backward, flash_attention, forward

__all__ = ["backward", "flash_attention", "forward"]
