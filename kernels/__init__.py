"""Flash attention in Triton: one source for GPUs and for the interpreter (``TRITON_INTERPRET=1``)."""

from kernels.decode import flash_decode
from kernels.interface import (
    backward,
    flash_attention,
    flash_attention_e4m3,
    flash_attention_e5m2,
    forward,
    score_bf16,
    score_e4m3,
    score_e5m2,
    score_fp16,
    score_tf32,
)

__all__ = [
    "backward",
    "flash_attention",
    "flash_attention_e4m3",
    "flash_attention_e5m2",
    "flash_decode",
    "forward",
    "score_bf16",
    "score_e4m3",
    "score_e5m2",
    "score_fp16",
    "score_tf32",
]
