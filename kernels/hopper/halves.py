"""A head dim in two parts, so that no product meets padding: 96 is 64 and 32, 192 is 128 and 64.

`kernels.tuning.parts` says which. Where there is one part, BLOCK_D2 is 0, and what stands for the second is a
number that nothing uses. The sums over the head dim are the same: on the matrix unit the second part goes on
where the first ends, and padding would have added zeros.
"""

import triton
import triton.language as tl


@triton.jit
def load_parts(d, d2, i_b, i_h, row, ROWS: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_D2: tl.constexpr):
    """Rows from ``row`` on of one head, both parts; what lies outside of the tensor reads as zero."""
    b_x = d.load([i_b, i_h, row, 0]).reshape(ROWS, BLOCK_D)
    b_x2 = 0
    if BLOCK_D2 > 0:
        b_x2 = d2.load([i_b, i_h, row, BLOCK_D]).reshape(ROWS, BLOCK_D2)
    return b_x, b_x2


@triton.jit
def zero_parts(ROWS: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_D2: tl.constexpr):
    """A sum of nothing yet, fp32, both parts."""
    b_sum = tl.zeros([ROWS, BLOCK_D], dtype=tl.float32)
    b_sum2 = 0
    if BLOCK_D2 > 0:
        b_sum2 = tl.zeros([ROWS, BLOCK_D2], dtype=tl.float32)
    return b_sum, b_sum2


@triton.jit
def product_of_rows(b_x, b_x2, b_y, b_y2, BLOCK_D2: tl.constexpr):
    """x y^T, summed over the head dim."""
    b_s = tl.dot(b_x, b_y.T)
    if BLOCK_D2 > 0:
        b_s = tl.dot(b_x2, b_y2.T, b_s)
    return b_s


@triton.jit
def add_product(b_w, b_x, b_x2, b_sum, b_sum2, BLOCK_D2: tl.constexpr):
    """The sums plus w x."""
    b_sum = tl.dot(b_w, b_x, b_sum)
    if BLOCK_D2 > 0:
        b_sum2 = tl.dot(b_w, b_x2, b_sum2)
    return b_sum, b_sum2


@triton.jit
def store_rows(
    p, first, m_row, b_x, b_x2, factor, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_D2: tl.constexpr
):
    """Rows of D contiguous numbers from the 64-bit offset ``first`` on, times the factor, rounded once."""
    o_d = tl.arange(0, BLOCK_D)[None, :]
    o_row = tl.arange(0, m_row.shape[0])[:, None] * D
    m_row = m_row[:, None]
    tl.store(p + (first + (o_row + o_d)), (b_x * factor).to(p.dtype.element_ty), mask=m_row & (o_d < D))
    if BLOCK_D2 > 0:
        o_d2 = BLOCK_D + tl.arange(0, BLOCK_D2)[None, :]
        b_x2 = (b_x2 * factor).to(p.dtype.element_ty)
        tl.store(p + (first + (o_row + o_d2)), b_x2, mask=m_row & (o_d2 < D))
