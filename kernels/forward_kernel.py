"""The forward pass: O and the natural log-sum-exp, one program a tile of queries.

Rounding points, per element: scores accumulate in fp32; ``exp2`` of one fused multiply-add
(`kernels.softmax`); the row sum adds unrounded fp32 probabilities; probabilities are rounded to v's dtype
for the product with v, which accumulates in fp32 and is rescaled at every tile; O is rounded once, at the
end. fp32 inputs multiply in IEEE fp32, not TF32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.masking import band_sees, row_sees_any, tile_range
from kernels.options import Options
from kernels.softmax import online_softmax_step
from kernels.tuning import forward_tile, padded

LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _walk_keys(
    b_q,
    b_acc,
    m_i,
    l_i,
    p_k,
    stride_kn,
    stride_kd,
    p_v,
    stride_vn,
    stride_vd,
    o_m,
    start,
    stop,
    sigma,
    score_factor,
    n_queries,
    key_limit,
    shift,
    left,
    right,
    D: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
    MASKED: tl.constexpr,
    PLAIN_SCORE: tl.constexpr,
    NEGATIVE: tl.constexpr,
    PRECISION: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Fold keys [start, stop), a tile at a time in ascending order, into the running state."""
    o_n = tl.arange(0, BLOCK_N)
    o_d = tl.arange(0, BLOCK_D)
    o_dv = tl.arange(0, BLOCK_DV)
    o_local = o_n.to(tl.int64) if WIDE else o_n
    o_k = o_d[:, None] * stride_kd + o_local[None, :] * stride_kn
    o_v = o_local[:, None] * stride_vn + o_dv[None, :] * stride_vd
    for i_n in tl.range(start, stop, BLOCK_N):
        o_j = i_n + o_n
        p_k_tile = p_k + tl.cast(i_n, tl.int64) * stride_kn
        p_v_tile = p_v + tl.cast(i_n, tl.int64) * stride_vn
        # Columns past the head dim and, where a tail can be met, keys past the end read as zero.
        m_k = (o_d[:, None] < D) & (o_j[None, :] < key_limit) if MASKED else (o_d[:, None] < D)
        m_v = (o_j[:, None] < key_limit) & (o_dv[None, :] < DV) if MASKED else (o_dv[None, :] < DV)
        b_k = tl.load(p_k_tile + o_k, mask=m_k, other=0.0)  # [BD, BN]
        b_s = tl.dot(b_q, b_k, input_precision=PRECISION)  # [BM, BN]
        if not PLAIN_SCORE:
            b_s = b_s * score_factor
        if MASKED:
            m_seen = band_sees(
                o_m[:, None], o_j[None, :], n_queries, key_limit, shift, left, right, HAS_LEFT, HAS_RIGHT
            )
            b_s = tl.where(m_seen, b_s, float("inf") if NEGATIVE else float("-inf"))
        b_p, b_alpha, m_i, l_i = online_softmax_step(
            b_s, sigma, m_i, l_i, NEGATIVE, p_v.dtype.element_ty == tl.float16
        )
        b_v = tl.load(p_v_tile + o_v, mask=m_v, other=0.0)  # [BN, BDV]
        b_acc = b_acc * b_alpha[:, None]
        b_acc = tl.dot(b_p.to(b_v.dtype), b_v, b_acc, input_precision=PRECISION)
    return b_acc, m_i, l_i


# Lengths and mask bounds take any value from call to call: no recompilation where one is 1 or divisible
# by 16.
@triton.jit(do_not_specialize=["n_tiles", "n_queries", "n_keys", "shift", "left", "right"])
def _forward_kernel(
    p_q,
    stride_qb,
    stride_qh,
    stride_qm,
    stride_qd,
    p_k,
    stride_kb,
    stride_kh,
    stride_kn,
    stride_kd,
    p_v,
    stride_vb,
    stride_vh,
    stride_vn,
    stride_vd,
    p_o,
    stride_ob,
    stride_oh,
    stride_om,
    stride_od,
    p_lse,
    stride_lb,
    stride_lh,
    n_heads,
    group,
    n_tiles,
    n_queries,
    n_keys,
    sigma,
    score_factor,
    shift,
    left,
    right,
    D: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
    PLAIN_SCORE: tl.constexpr,
    NEGATIVE: tl.constexpr,
    PRECISION: tl.constexpr,
    WIDE: tl.constexpr,
):
    # The last rows see the most keys under a causal mask: they start first.
    i_t = n_tiles - 1 - tl.program_id(0) % n_tiles
    i_bh = tl.program_id(0) // n_tiles
    i_b = (i_bh // n_heads).to(tl.int64)
    i_h = (i_bh % n_heads).to(tl.int64)
    i_hk = i_h // group
    i_m = i_t * BLOCK_M
    key_limit = n_keys

    # Tile starts are 64-bit before any multiplication; offsets inside a tile are too where WIDE.
    p_q += i_b * stride_qb + i_h * stride_qh + i_m.to(tl.int64) * stride_qm
    p_k += i_b * stride_kb + i_hk * stride_kh
    p_v += i_b * stride_vb + i_hk * stride_vh
    p_o += i_b * stride_ob + i_h * stride_oh + i_m.to(tl.int64) * stride_om
    p_lse += i_b * stride_lb + i_h * stride_lh + i_m

    o_local = tl.arange(0, BLOCK_M)
    o_m = i_m + o_local
    o_d = tl.arange(0, BLOCK_D)
    o_dv = tl.arange(0, BLOCK_DV)
    o_rows = o_local.to(tl.int64) if WIDE else o_local
    m_rows = o_m < n_queries
    b_q = tl.load(
        p_q + o_rows[:, None] * stride_qm + o_d[None, :] * stride_qd,
        mask=m_rows[:, None] & (o_d[None, :] < D),
        other=0.0,
    )

    b_acc = tl.zeros([BLOCK_M, BLOCK_DV], dtype=tl.float32)
    m_i = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    l_i = tl.zeros([BLOCK_M], dtype=tl.float32)
    last = tl.minimum(i_m + BLOCK_M, n_queries) - 1
    start, full_start, full_stop, stop = tile_range(
        i_m, last, key_limit, True, shift, left, right, HAS_LEFT, HAS_RIGHT, BLOCK_N
    )
    for i_part in tl.static_range(3):
        if i_part == 0:
            part_start, part_stop = start, tl.minimum(full_start, stop)
        elif i_part == 1:
            part_start, part_stop = full_start, full_stop
        else:
            part_start, part_stop = full_stop, stop
        b_acc, m_i, l_i = _walk_keys(
            b_q,
            b_acc,
            m_i,
            l_i,
            p_k,
            stride_kn,
            stride_kd,
            p_v,
            stride_vn,
            stride_vd,
            o_m,
            part_start,
            part_stop,
            sigma,
            score_factor,
            n_queries,
            key_limit,
            shift,
            left,
            right,
            D,
            DV,
            BLOCK_N,
            BLOCK_D,
            BLOCK_DV,
            HAS_LEFT,
            HAS_RIGHT,
            i_part != 1,
            PLAIN_SCORE,
            NEGATIVE,
            PRECISION,
            WIDE,
        )

    # Whether a row sees a key is asked of the mask, not of m_i or l_i: scores that overflowed to -inf
    # leave those looking empty, and must give NaN (0/0 below), not a finite row of zeros.
    m_any = row_sees_any(o_m, key_limit, shift, left, right, HAS_LEFT, HAS_RIGHT)
    b_o = tl.where(m_any[:, None], b_acc / l_i[:, None], 0.0)
    b_lse = tl.where(m_any, (m_i + tl.log2(l_i)) * LN2, float("-inf"))
    tl.store(
        p_o + o_rows[:, None] * stride_om + o_dv[None, :] * stride_od,
        b_o.to(p_o.dtype.element_ty),
        mask=m_rows[:, None] & (o_dv[None, :] < DV),
    )
    tl.store(p_lse + o_local, b_lse, mask=m_rows)


def launch_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: Options
) -> tuple[torch.Tensor, torch.Tensor]:
    """O (batch, heads, Nq, value dim) in v's dtype and the natural log-sum-exp (batch, heads, Nq) in fp32."""
    batch, heads, num_queries, head_dim = q.shape
    num_keys, value_dim = v.shape[2:]
    out = torch.empty((batch, heads, num_queries, value_dim), dtype=v.dtype, device=v.device)
    lse = torch.empty((batch, heads, num_queries), dtype=torch.float32, device=q.device)
    if out.shape[:3].numel() == 0:
        return out, lse
    tile = forward_tile(q.device.type, q.element_size(), head_dim, value_dim, num_queries, num_keys)
    num_tiles = triton.cdiv(num_queries, tile.block_m)
    _forward_kernel[(num_tiles * batch * heads,)](
        q,
        *q.stride(),
        k,
        *k.stride(),
        v,
        *v.stride(),
        out,
        *out.stride(),
        lse,
        *lse.stride()[:2],
        heads,
        heads // k.shape[1],
        num_tiles,
        num_queries,
        num_keys,
        options.sigma,
        options.score_factor,
        options.shift,
        options.left or 0,
        options.right or 0,
        D=head_dim,
        DV=value_dim,
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        BLOCK_D=padded(head_dim),
        BLOCK_DV=padded(value_dim),
        HAS_LEFT=options.left is not None,
        HAS_RIGHT=options.right is not None,
        PLAIN_SCORE=options.plain_score,
        NEGATIVE=options.sigma < 0,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
        WIDE=needs_wide_offsets(tile.block_m, tile.block_n, q, k, v, out),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    return out, lse


def needs_wide_offsets(block_m: int, block_n: int, *tensors: torch.Tensor) -> bool:
    """Whether offsets inside one tile can pass 2^31 elements."""
    rows = max(block_m, block_n)
    return any(rows * abs(x.stride(2)) + padded(x.shape[3]) * abs(x.stride(3)) >= 2**31 for x in tensors)
