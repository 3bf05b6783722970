"""flash-attn 2, 3 and 4 by their public ``flash_attn_func``; CUDA only.

Read from Dao-AILab/flash-attention at 0251105 (csrc/flash_attn, hopper, flash_attn/cute):

2   Scale and log2 e are one fp32 constant (two roundings), fused with the subtraction of the maximum. Key
    tiles from last to first; their size goes by head dim and GPU, so it is not declared. Head dims are padded
    to multiples of 8. LSE of an empty row is +inf. dQ is summed by atomics; dK and dV of grouped heads are
    stored per query head in the input format before they are summed.
3   The same forward for Hopper; an empty row has O = 0 and LSE = -inf, but with no keys at all +inf. dK and
    dV of grouped heads are summed in fp32. Its fp8 forward is not declared: it has no backward.
4   The same in CuTe, with a sink and a gradient of the LSE; read in flash-attn-4 4.0.0b36. The scale, log2 e
    and their product are rounded each. Without queries or keys O = 0 and the LSE is -inf, or the sink. Head
    dims are multiples of 8, to 256 on Hopper and to 128 everywhere. On Blackwell part of the exponentials is
    a cubic polynomial (8.8e-5), and 16-bit inputs skip rescaling while the maximum grows by less than 8 (base
    2); on Hopper neither. ``deterministic``, which orders the sums of the backward, is left at False.
    That release has wrong gradients of head dims like 8 and 72 on Hopper (golden/findings/020), and an
    infinite LSE beside a large sink (021); nothing is done about that here.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from flashcheck.adapters.flash_attn_like import differentiated, from_flash_attn_like, usual_arithmetic
from flashcheck.adapters.optional import installed, required, version_of
from flashcheck.arithmetic import Arithmetic
from flashcheck.kernel import Kernel
from flashcheck.problem import Problem

_HOPPER, _BLACKWELL = 9, 10
CUBIC_EXP_ERROR = 2.0**-13  # flash_attn/cute's polynomial of degree 3: 8.76e-5 at worst


def two_kernel() -> Kernel:
    """``flash_attn.2``."""
    (function,) = required("flash_attn.2", "flash_attn", ("flash_attn_func",), "pip install flash-attn")
    # Causal ALiBi adds slope * j, the same for every row: O is the contract's, the LSE is shifted by row.
    changes = {"head_dim": (1, 256), "head_dim_multiple": 1, "not_together": (("causal", "alibi_slopes"),)}
    return _kernel("flash_attn.2", function, version_of("flash_attn"), two_arithmetic, changes)


def three_kernel() -> Kernel:
    """``flash_attn.3``."""
    install = "python setup.py install in flash-attention's folder hopper"
    (function,) = required("flash_attn.3", "flash_attn_interface", ("flash_attn_func",), install)
    version = version_of("flash_attn_interface")
    return _kernel("flash_attn.3", function, version, three_arithmetic, {"empty_rows": True})


def four_kernel() -> Kernel:
    """``flash_attn.4``."""
    install = "pip install flash-attn-4"
    (function,) = required("flash_attn.4", "flash_attn.cute", ("flash_attn_func",), install)
    changes = {
        "empty_rows": True,
        "zero_length": True,
        "head_dim": (8, 256 if _major() == _HOPPER else 128),
        "gradients": ("dq", "dk", "dv", "dsink"),
        "dlse": True,
    }
    version = installed("flash-attn-4")
    if version is None:  # from a checkout
        version = version_of("flash_attn.cute")
    return _kernel("flash_attn.4", function, version, four_arithmetic, changes)


def two_arithmetic(problem: Problem) -> Arithmetic:
    """What flash-attn 2 does with this problem."""
    # Built with --use_fast_math, as flash-attn 3 is.
    return replace(
        usual_arithmetic(problem), atomic_dq=True, group_grad_format=problem.format, flush_subnormals=True
    )


def three_arithmetic(problem: Problem) -> Arithmetic:
    """What flash-attn 3 does with this problem."""
    return replace(usual_arithmetic(problem), atomic_dq=True, flush_subnormals=True)


def four_arithmetic(problem: Problem) -> Arithmetic:
    """What flash-attn 4 does with this problem, on the GPU where it lies."""
    usual = replace(usual_arithmetic(problem), scale_roundings=3, atomic_dq=True)
    device = problem.q.device
    if device.type != "cuda" or _major(device) < _BLACKWELL:
        return usual
    return replace(usual, exp_error=CUBIC_EXP_ERROR, rescale_threshold=8.0)


def _major(device: torch.device | None = None) -> int:
    """The first number of a GPU's compute capability; 0 where there is none."""
    return torch.cuda.get_device_capability(device)[0] if torch.cuda.is_available() else 0


def _kernel(name: str, function: Any, version: str, arithmetic: Any, changes: dict[str, Any]) -> Kernel:
    kernel = from_flash_attn_like(function, name, source=f"{name} {version} {function.__module__}".strip())
    capabilities = replace(kernel.capabilities, devices=("cuda",), **changes)
    return differentiated(replace(kernel, capabilities=capabilities, arithmetic=arithmetic), function)
