"""Kernels that others ship, and the emulator, by the names that users type."""

from __future__ import annotations

import importlib
from collections.abc import Callable

from flashcheck import emulator
from flashcheck.kernel import Kernel

_MAKERS = {
    "torch.sdpa.flash": ("torch_sdpa", "flash_kernel"),
    "torch.sdpa.math": ("torch_sdpa", "math_kernel"),
    "torch.sdpa.cuda.flash": ("torch_sdpa_cuda", "flash_kernel"),
    "torch.sdpa.cuda.efficient": ("torch_sdpa_cuda", "efficient_kernel"),
    "torch.sdpa.cuda.cudnn": ("torch_sdpa_cuda", "cudnn_kernel"),
    "torch.sdpa.cuda.math": ("torch_sdpa_cuda", "math_kernel"),
    "torch.flex.eager": ("torch_flex", "eager_kernel"),
    "torch.flex.compiled": ("torch_flex", "compiled_kernel"),
    "eager": ("eager", "eager_kernel"),
    "jax.dot_product_attention": ("jax_attention", "dot_product_kernel"),
    "jax.pallas.mha": ("jax_attention", "pallas_kernel"),
    "jax.cuda.xla": ("jax_cuda", "xla_kernel"),
    "jax.cuda.cudnn": ("jax_cuda", "cudnn_kernel"),
    "jax.cuda.pallas": ("jax_cuda", "pallas_kernel"),
    "torch.varlen": ("torch_varlen", "varlen_kernel"),
    "flash_attn.2": ("flash_attn", "two_kernel"),
    "flash_attn.3": ("flash_attn", "three_kernel"),
    "flash_attn.4": ("flash_attn", "four_kernel"),
    "xformers.flash": ("xformers_attention", "flash_kernel"),
    "xformers.cutlass": ("xformers_attention", "cutlass_kernel"),
    "triton.tutorial": ("triton_tutorial", "tutorial_kernel"),
    "flashinfer.single_prefill": ("flashinfer_prefill", "single_prefill_kernel"),
}


def _maker(module: str, function: str) -> Callable[[], Kernel]:
    """Imports the adapter, and with it what it wraps, only when the kernel is asked for."""

    def make() -> Kernel:
        kernel: Kernel = getattr(importlib.import_module(f"flashcheck.adapters.{module}"), function)()
        return kernel

    return make


BUILT_IN: dict[str, Callable[[], Kernel]] = dict(emulator.KERNELS) | {
    name: _maker(*where) for name, where in _MAKERS.items()
}
"""Name -> maker."""
