"""Small Triton kernels that expose one operation each.

Decorated when imported: in the interpreter where TRITON_INTERPRET was set before (``devices.py``).
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

try:
    from triton.language.extra import libdevice
except ImportError:  # not every build of Triton has it
    libdevice = None

INTERPRETED_BLOCK = 1 << 17
COMPILED_BLOCK = 1024


@triton.jit
def dot_kernel(
    p_a,
    p_b,
    p_c,
    p_out,
    M: tl.constexpr,
    K: tl.constexpr,
    N: tl.constexpr,
    PRECISION: tl.constexpr,
    IMPRECISE: tl.constexpr,
):
    """out = c + a b for program i's [M, K] and [K, N] tiles; c is [M], the same in every column."""
    i = tl.program_id(0)
    o_m, o_k, o_n = tl.arange(0, M), tl.arange(0, K), tl.arange(0, N)
    b_a = tl.load(p_a + i * M * K + o_m[:, None] * K + o_k[None, :])
    b_b = tl.load(p_b + i * K * N + o_k[:, None] * N + o_n[None, :])
    b_c = tl.load(p_c + i * M + o_m)[:, None] + tl.zeros([M, N], dtype=tl.float32)
    b_out = tl.dot(b_a, b_b, b_c, input_precision=PRECISION, max_num_imprecise_acc=IMPRECISE)
    tl.store(p_out + i * M * N + o_m[:, None] * N + o_n[None, :], b_out)


@triton.jit
def cast_kernel(p_in, p_out, BLOCK: tl.constexpr):
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(p_out + o, tl.load(p_in + o).to(p_out.dtype.element_ty))


@triton.jit
def unary_kernel(p_in, p_out, OP: tl.constexpr, BLOCK: tl.constexpr):
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(p_in + o)
    if OP == "exp2":
        y = tl.exp2(x)
    elif OP == "exp":
        y = tl.exp(x)
    elif OP == "log2":
        y = tl.log2(x)
    elif OP == "log":
        y = tl.log(x)
    elif OP == "reciprocal":
        y = 1.0 / x
    elif OP == "tanh":
        y = libdevice.tanh(x)
    else:
        y = 2 * tl.sigmoid(2 * x) - 1
    tl.store(p_out + o, y)


@triton.jit
def binary_kernel(p_a, p_b, p_out, OP: tl.constexpr, BLOCK: tl.constexpr):
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    a, b = tl.load(p_a + o), tl.load(p_b + o)
    if OP == "division":
        y = a / b
    elif OP == "product with reciprocal":
        y = a * (1.0 / b)
    else:
        y = a + b
    tl.store(p_out + o, y)


@triton.jit
def fused_kernel(p_a, p_b, p_c, p_out, EXPLICIT: tl.constexpr, BLOCK: tl.constexpr):
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    a, b, c = tl.load(p_a + o), tl.load(p_b + o), tl.load(p_c + o)
    y = tl.fma(a, b, c) if EXPLICIT else a * b + c
    tl.store(p_out + o, y)


def interpreted() -> bool:
    """True where these kernels run in the interpreter, False where they are compiled."""
    return not isinstance(cast_kernel, triton.runtime.jit.JITFunction)


def launch(kernel: Any, count: int, *arguments: Any, **constants: Any) -> None:
    """Runs an elementwise kernel over ``count`` elements (a multiple of 1024)."""
    block = min(count, INTERPRETED_BLOCK if interpreted() else COMPILED_BLOCK)
    while count % block:
        block //= 2
    kernel[(count // block,)](*arguments, **constants, BLOCK=block)
