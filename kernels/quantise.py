"""q, k and v in the score path's format, before the kernels run, and the factors that undo the scales.

Scales are powers of two, the largest c with c * max|x| within the format, so that scaling rounds nothing; the
maximum is taken over finite elements of the rows that are not padding. NaN stays NaN; an infinity that the
format cannot hold becomes NaN, never a finite number. Rows of padding are not read, and become zero.

The rotation (``hadamard``) of q and k is by the matrix (-1)^popcount(i & j), after the signs
(-1)^popcount(j & (j >> 1)) (Rudin and Shapiro's, whose transform is flat), over dims padded to a power of
two. It runs as a fast Walsh-Hadamard transform in fp32: additions only, from the lowest index bit up. q . k
grows by the number of dims, which q's factor takes out again. It spreads outliers over the dims: Shah et al.
2024 (arXiv 2407.08608), section 3.3.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.launch import device_of
from kernels.operands import Operands
from kernels.options import Options
from kernels.rounding import to_operand
from kernels.score_path import FP8, OPERAND_DTYPE, ScorePath
from kernels.tuning import padded

_BLOCK_ROWS = 128
_BLOCK_WORDS = 32  # of four rows
_LARGEST = {"e4m3": 9, "e5m2": 16}
"""The formats' largest numbers are 0.875 * 2^n."""
_LIMIT = 126
"""Scales stay within 2^-126..2^126, so that they and their inverses are normal fp32 numbers."""


@triton.jit
def _rotated(b_x, ROWS: tl.constexpr, BLOCK_D: tl.constexpr, LOG_D: tl.constexpr):
    o_d = tl.arange(0, BLOCK_D)
    parity = o_d & (o_d >> 1)
    parity ^= parity >> 4
    parity ^= parity >> 2
    parity ^= parity >> 1
    b_x = tl.where((parity & 1)[None, :] == 1, -b_x, b_x)
    for _ in tl.static_range(LOG_D):
        b_even, b_odd = tl.split(tl.reshape(b_x, [ROWS, BLOCK_D // 2, 2]))
        b_x = tl.join(b_even + b_odd, b_even - b_odd)
        b_x = tl.reshape(tl.permute(b_x, [0, 2, 1]), [ROWS, BLOCK_D])
    return b_x


@triton.jit
def _load_rows(
    p_x, s_x, i_b, i_h, i_row, n_rows, D: tl.constexpr, ROWS: tl.constexpr, BLOCK_D: tl.constexpr,
    LOG_D: tl.constexpr, ROTATE: tl.constexpr,
):  # fmt: skip
    """Rows i_row .. i_row + ROWS of one head in fp32, zero from n_rows on, rotated where ROTATE."""
    o_row = i_row + tl.arange(0, ROWS)
    o_d = tl.arange(0, BLOCK_D)
    o_x = o_row.to(tl.int64)[:, None] * s_x[2] + o_d.to(tl.int64)[None, :] * s_x[3]
    m = (o_row < n_rows)[:, None] & (o_d < D)[None, :]
    b_x = tl.load(p_x + i_b * s_x[0] + i_h * s_x[1] + o_x, mask=m, other=0.0).to(tl.float32)
    if ROTATE:
        b_x = _rotated(b_x, ROWS, BLOCK_D, LOG_D)
    return b_x


@triton.jit
def _rows_read(i_b, n_rows, p_lengths):
    """Rows of batch i_b that are not padding."""
    n_read = n_rows
    if p_lengths is not None:
        n_read = tl.minimum(tl.maximum(tl.load(p_lengths + i_b), 0), n_rows).to(tl.int32)
    return n_read


@triton.jit(do_not_specialize=["n_blocks", "n_rows", "rows"])
def _maximum_kernel(
    p_x, s_x, p_amax, p_lengths, n_blocks, n_heads, n_rows, rows,
    D: tl.constexpr, ROWS: tl.constexpr, BLOCK_D: tl.constexpr, LOG_D: tl.constexpr, ROTATE: tl.constexpr,
):  # fmt: skip
    """Largest finite magnitude of each block of ``rows`` rows, into (batch, heads, blocks)."""
    i_block = tl.program_id(0) % n_blocks
    i_bh = tl.program_id(0) // n_blocks
    i_b, i_h = (i_bh // n_heads).to(tl.int64), (i_bh % n_heads).to(tl.int64)
    n_read = _rows_read(i_b, n_rows, p_lengths)
    stop = tl.minimum(i_block * rows + rows, n_read)
    b_top = tl.zeros([ROWS], dtype=tl.float32)
    for i_row in tl.range(i_block * rows, stop, ROWS):
        b_x = tl.abs(_load_rows(p_x, s_x, i_b, i_h, i_row, stop, D, ROWS, BLOCK_D, LOG_D, ROTATE))
        b_top = tl.maximum(b_top, tl.max(tl.where(b_x < float("inf"), b_x, 0.0), 1))
    tl.store(p_amax + tl.program_id(0), tl.max(b_top, 0))


@triton.jit(do_not_specialize=["n_blocks", "n_rows", "rows"])
def _convert_kernel(
    p_x, s_x, p_out, s_out, p_scale, s_scale, p_lengths, n_blocks, n_heads, n_rows, rows,
    D: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK_D: tl.constexpr, LOG_D: tl.constexpr,
    ROTATE: tl.constexpr, FORMAT: tl.constexpr,
):  # fmt: skip
    """Each block of ``rows`` rows times its scale, rounded; WIDTH columns are written."""
    i_block = tl.program_id(0) % n_blocks
    i_bh = tl.program_id(0) // n_blocks
    i_b, i_h = (i_bh // n_heads).to(tl.int64), (i_bh % n_heads).to(tl.int64)
    n_read = _rows_read(i_b, n_rows, p_lengths)
    scale = 1.0
    if p_scale is not None:
        scale = tl.load(p_scale + i_b * s_scale[0] + i_h * s_scale[1] + i_block * s_scale[2])
    stop = tl.minimum(i_block * rows + rows, n_rows)
    o_d = tl.arange(0, BLOCK_D)
    for i_row in tl.range(i_block * rows, stop, ROWS):
        b_x = _load_rows(p_x, s_x, i_b, i_h, i_row, n_read, D, ROWS, BLOCK_D, LOG_D, ROTATE) * scale
        if FORMAT == "e4m3" or FORMAT == "e5m2":  # noqa: PLR1714
            b_x = tl.where(tl.abs(b_x) == float("inf"), float("nan"), b_x)
        o_row = i_row + tl.arange(0, ROWS)
        o_out = o_row.to(tl.int64)[:, None] * s_out[2] + o_d.to(tl.int64)[None, :] * s_out[3]
        m = (o_row < stop)[:, None] & (o_d < WIDTH)[None, :]
        tl.store(p_out + i_b * s_out[0] + i_h * s_out[1] + o_out, to_operand(b_x, FORMAT), mask=m)


@triton.jit(do_not_specialize=["n_blocks", "n_rows", "n_units"])
def _columns_kernel(
    p_x, s_x, p_out, s_out, n_blocks, n_heads, n_rows, n_units,
    D: tl.constexpr, WORDS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Bytes of four rows at a time, packed into words that are written with rows contiguous."""
    i_block = tl.program_id(0) % n_blocks
    i_bh = tl.program_id(0) // n_blocks
    i_b, i_h = (i_bh // n_heads).to(tl.int64), (i_bh % n_heads).to(tl.int64)
    o_word = i_block.to(tl.int64) * WORDS + tl.arange(0, WORDS)
    o_d = tl.arange(0, BLOCK_D).to(tl.int64)[None, :]
    p_x += i_b * s_x[0] + i_h * s_x[1]
    b_out = tl.zeros([WORDS, BLOCK_D], dtype=tl.int32)
    for i in tl.static_range(4):
        o_row = o_word * 4 + i
        m_x = (o_row < n_rows)[:, None] & (o_d < D)
        b_x = tl.load(p_x + o_row[:, None] * s_x[2] + o_d * s_x[3], mask=m_x, other=0)
        b_out |= b_x.to(tl.int32) << (8 * i)
    # Whole units of 16 bytes, so that the compiler may write them at once; zeros behind the rows' end.
    m_out = (o_word // 4 < n_units)[:, None] & (o_d < D)
    o_out = i_b * s_out[0] + i_h * s_out[1] + o_word[:, None] + o_d * s_out[2]
    tl.store(p_out + o_out, b_out, mask=m_out)


def columns(x: Tensor) -> Tensor:
    """A copy of fp8 ``x`` (batch, heads, length, dim) whose rows are contiguous for each dim.

    Starts and strides are whole units of 16 bytes. The matrix unit reads the v of an fp8 product this way; to
    turn every tile in every program costs more.
    """
    batch, heads, length, dim = x.shape
    units = -(-length // 16)
    out = torch.empty((batch, heads, dim, 4 * units), dtype=torch.int32, device=x.device)
    if out.numel():
        blocks, bits = triton.cdiv(4 * units, _BLOCK_WORDS), x.view(torch.uint8)
        # 8 warps: as fast as a plain copy on an H200, a twentieth faster than 4.
        constants = {"D": dim, "WORDS": _BLOCK_WORDS, "BLOCK_D": padded(dim), "num_warps": 8}
        with device_of(x):
            _columns_kernel[(batch * heads * blocks,)](
                bits, bits.stride(), out, out.stride(), blocks, heads, length, units, **constants
            )
    return out.view(x.dtype).mT[:, :, :length]


def prepare(q: Tensor, k: Tensor, v: Tensor, options: Options, path: ScorePath) -> Operands:
    """The operands of a call: the tensors themselves where nothing is to be converted."""
    if not path.converts:
        return Operands(q, k, v)
    q_operand, q_factor = _convert(q, None, path, rotate=path.hadamard)
    k_operand, k_factor = _convert(k, options.key_lengths, path, rotate=path.hadamard)
    # The scale of v must leave the sum over keys: one number a head.
    v_operand, v_factor = _convert(v, options.key_lengths, path, rotate=False, is_value=True)
    if path.hadamard and q_factor is not None:
        q_factor = q_factor / q_operand.shape[3]
    return Operands(q_operand, k_operand, v_operand, q_factor, k_factor, v_factor)


def _convert(
    x: Tensor, lengths: Tensor | None, path: ScorePath, *, rotate: bool, is_value: bool = False
) -> tuple[Tensor, Tensor | None]:
    batch, heads, length, dim = x.shape
    block_d = padded(dim, path.smallest_dim())
    width = block_d if rotate else dim
    dtype = OPERAND_DTYPE[path.operand]
    if is_value and path.operand in FP8:
        # Keys contiguous: fp8 products read both operands along the summed dimension.
        out = torch.empty((batch, heads, width, padded(length)), dtype=dtype, device=x.device)
        out = out.mT[:, :, :length]
    else:
        out = torch.empty((batch, heads, length, width), dtype=dtype, device=x.device)
    by_rows = path.scales == "rows" and not is_value
    rows = path.rows if by_rows else _BLOCK_ROWS
    blocks = triton.cdiv(length, rows)
    if out.numel() == 0:
        return out, None if path.scales is None else x.new_ones((batch, heads, 1), dtype=torch.float32)
    grid = (batch * heads * blocks,)
    constants = {
        "D": dim,
        "ROWS": min(padded(rows), max(16, 8192 // block_d)),
        "BLOCK_D": block_d,
        "LOG_D": block_d.bit_length() - 1,
        "ROTATE": rotate,
    }
    scale = None
    with device_of(x):
        if path.scales is not None:
            amax = torch.empty((batch, heads, blocks), dtype=torch.float32, device=x.device)
            _maximum_kernel[grid](x, x.stride(), amax, lengths, blocks, heads, length, rows, **constants)
            if not by_rows:
                amax = amax.amax((0, 1, 2) if path.scales == "tensor" else 2, keepdim=True)
            scale = _scale(amax, path.operand).expand(batch, heads, blocks)
        _convert_kernel[grid](
            x, x.stride(), out, out.stride(), scale, (0, 0, 0) if scale is None else scale.stride(), lengths,
            blocks, heads, length, rows, WIDTH=width, FORMAT=path.operand, **constants,
        )  # fmt: skip
    if scale is None:
        return out, None
    factor = 1.0 / scale
    if by_rows:
        return out, factor.repeat_interleave(rows, 2)[:, :, :length].contiguous()
    return out, factor[..., :1].contiguous()


def _scale(amax: Tensor, operand: str) -> Tensor:
    """The largest power of two c with c * amax <= 0.875 * 2^n; 1 for zero."""
    significand, exponent = torch.frexp(amax)
    power = _LARGEST[operand] - exponent - (significand > 0.875).to(exponent.dtype)
    power = torch.where(amax > 0, power, 0).clamp(-_LIMIT, _LIMIT)
    return torch.ldexp(torch.ones_like(amax), power)
