"""First step of the backward: delta = rowsum(dO * O) - dLSE, in fp32.

With dP = dO V^T, the gradient of the scores is P * (dP - delta); a gradient of the log-sum-exp enters
with P as its factor, so it is folded in here. Flash attention, Dao 2023, algorithm 2, line 4.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.launch import device_of
from kernels.launched import Launch, layout, remembered
from kernels.tuning import padded

_ROWS = 64
_launches: dict[tuple[object, ...], Launch] = {}


@triton.jit(do_not_specialize=["n_tiles", "n_queries"])
def _delta_kernel(
    p_o,
    s_o,
    p_do,
    s_do,
    p_dlse,
    s_dlse,
    p_delta,
    s_delta,
    n_tiles,
    n_heads,
    n_queries,
    DV: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_DV: tl.constexpr,
):
    i_bh = tl.program_id(0) // n_tiles
    i_b = (i_bh // n_heads).to(tl.int64)
    i_h = (i_bh % n_heads).to(tl.int64)
    o_m = (tl.program_id(0) % n_tiles).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    o_dv = tl.arange(0, BLOCK_DV)
    m_row = o_m < n_queries
    m_tile = m_row[:, None] & (o_dv[None, :] < DV)
    p_o += i_b * s_o[0] + i_h * s_o[1]
    p_do += i_b * s_do[0] + i_h * s_do[1]
    b_o = tl.load(p_o + o_m[:, None] * s_o[2] + o_dv[None, :] * s_o[3], mask=m_tile, other=0.0).to(tl.float32)
    b_do = tl.load(p_do + o_m[:, None] * s_do[2] + o_dv[None, :] * s_do[3], mask=m_tile, other=0.0).to(
        tl.float32
    )
    b_delta = tl.sum(b_o * b_do, 1)
    if p_dlse is not None:
        p_dlse += i_b * s_dlse[0] + i_h * s_dlse[1]
        b_delta -= tl.load(p_dlse + o_m * s_dlse[2], mask=m_row, other=0.0)
    tl.store(p_delta + i_b * s_delta[0] + i_h * s_delta[1] + o_m * s_delta[2], b_delta, mask=m_row)


def launch_delta(dout: Tensor, out: Tensor, dlse: Tensor | None) -> Tensor:
    """delta (batch, heads, Nq) in fp32."""
    batch, heads, num_queries, value_dim = out.shape
    delta = torch.empty((batch, heads, num_queries), dtype=torch.float32, device=out.device)
    if delta.numel() == 0:
        return delta

    def make() -> Launch:
        num_tiles = triton.cdiv(num_queries, _ROWS)
        constants = {"DV": value_dim, "BLOCK_M": _ROWS, "BLOCK_DV": padded(value_dim)}
        return Launch(num_tiles * batch * heads, (), ((num_tiles, heads, num_queries), ()), constants)

    no_strides = (0, 0, 0)
    key = (out.get_device(), layout(out), layout(dout), None if dlse is None else layout(dlse))
    before = (out, out.stride(), dout, dout.stride(), dlse, no_strides if dlse is None else dlse.stride())
    with device_of(out):
        remembered(_launches, key, make).run(_delta_kernel, (), (*before, delta, delta.stride()))
    return delta
