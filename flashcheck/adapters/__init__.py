"""Kernels that others ship, and the emulator, by the names that users type."""

from __future__ import annotations

from collections.abc import Callable

from flashcheck import emulator
from flashcheck.kernel import Kernel

BUILT_IN: dict[str, Callable[[], Kernel]] = dict(emulator.KERNELS)
"""Name -> maker. Adapters import what they wrap only when their maker is called."""


def _torch_sdpa_flash() -> Kernel:
    from flashcheck.adapters.torch_sdpa import flash_kernel

    return flash_kernel()


def _torch_sdpa_math() -> Kernel:
    from flashcheck.adapters.torch_sdpa import math_kernel

    return math_kernel()


BUILT_IN["torch.sdpa.flash"] = _torch_sdpa_flash
BUILT_IN["torch.sdpa.math"] = _torch_sdpa_math
