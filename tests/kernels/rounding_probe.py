"""Runs the kernels' rounding by itself."""

import torch
import triton
import triton.language as tl

from kernels.rounding import nearest_e4m3, nearest_e5m2, nearest_tf32


@triton.jit
def _rounding_kernel(p_x, p_out, FORMAT: tl.constexpr, BLOCK: tl.constexpr):
    o = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(p_x + o)
    if FORMAT == "e4m3":
        y = nearest_e4m3(x)
    elif FORMAT == "e5m2":
        y = nearest_e5m2(x)
    else:
        y = nearest_tf32(x)
    tl.store(p_out + o, y)


@triton.jit
def _cast_kernel(p_x, p_out, BLOCK: tl.constexpr):
    o = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(p_out + o, tl.load(p_x + o).to(p_out.dtype.element_ty))


def rounded(x, name, block=4096):
    """fp32 ``x`` (a multiple of ``block`` numbers) rounded in the fp32 domain."""
    out = torch.empty_like(x)
    _rounding_kernel[(x.numel() // block,)](x, out, name, block)
    return out


def cast(x, dtype, block=4096):
    """fp32 ``x`` converted by the machine's own instruction."""
    out = torch.empty(x.shape, dtype=dtype, device=x.device)
    _cast_kernel[(x.numel() // block,)](x, out, block)
    return out
