"""The forward pass with its warps in roles: one loads, groups of four compute, two products in flight each.

Triton's own pipeline waits for every product before the softmax. Here, in Gluon, the product with the last
values runs beside the softmax of the next scores (the assembler says, beside its maxima: kernels/README.md),
and while one group exponentiates another multiplies (flash attention 3, Shah et al. 2024, arXiv 2407.08608,
section 3.2). Only for Hopper, and not in the interpreter, where Gluon has no meaning:
`kernels.hopper.forward` computes the same, with the same rounding points in the same order, bit by bit where
tiles hold as many keys.

Keys and values go through rings of STAGES tiles. A tile's "full" barrier opens when it has arrived, its
"empty" barrier when all groups have read it. Each group's queries have such a pair too: a program may work on
several tiles of queries, one after the other.

There are two groups, or three or four with fewer registers each: these convert the weights late, in place of
the scores, and each visits no more tiles than its own rows see. At head dim 64, where products are short
beside the exponentials, the matrix unit idles less that way.

A head dim between two powers of two is split into one and a half of it, and no product meets the padding: 96
is 64 and 32, 192 is 128 and 64 (rings, descriptors and accumulators of the second part end in 2). The sums
are the same: the padding adds zeros.
"""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from kernels.hopper.calls import section_heads
from kernels.hopper.launch import ends, tiles_of
from kernels.launch import device_of, softmax_constants
from kernels.launched import Launch, layout, remembered
from kernels.operands import Operands
from kernels.options import Options
from kernels.score_path import FP8, ScorePath
from kernels.tuning import Tile, parts

# Named async_load from Triton 3.7 on, and only so from 3.9 on.
_copy_tile = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
_GROUP_ROWS = gl.constexpr(64)
_CLEARED_ROWS = gl.constexpr(16)
_LN2 = gl.constexpr(0.6931471805599453)
_ELEMENT = {
    torch.float16: gl.float16,
    torch.bfloat16: gl.bfloat16,
    torch.float8_e4m3fn: gl.float8e4nv,
    torch.float8_e5m2: gl.float8e5,
}


@gluon.jit
def _segment(i_slot, p_cu, n_segments, BLOCK: gl.constexpr, WARPS: gl.constexpr):
    """`kernels.hopper.packed.segment_of`: the segment that owns a slot, and the tile's number in it."""
    of_segments: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    i_segment = i_slot * 0 - 1
    for i_chunk in range(0, n_segments, 32):
        o_s = i_chunk + gl.arange(0, 32, of_segments)
        first = gl.load(p_cu + o_s, mask=o_s < n_segments, other=0).to(gl.int32) // BLOCK + o_s
        i_segment += gl.sum(((o_s < n_segments) & (first <= i_slot)).to(gl.int32), 0)
    i_segment = gl.maximum(i_segment, 0)
    return i_segment, i_slot - (gl.load(p_cu + i_segment).to(gl.int32) // BLOCK + i_segment)


@gluon.jit
def _bounds(i_segment, p_cu, total):
    """`kernels.hopper.packed.bounds`."""
    start = gl.minimum(gl.maximum(gl.load(p_cu + i_segment).to(gl.int32), 0), total)
    stop = gl.minimum(gl.load(p_cu + i_segment + 1).to(gl.int32), total)
    return start, gl.maximum(stop - start, 0)


@gluon.jit
def _spread(i_work, i_round, n_work, SPREAD: gl.constexpr):
    """Another work of the same round: programs change places by one each round, but for the last.

    Where the tiles of a head divide the programs, some would have its last tile, which may be nearly empty,
    in each round, and the others never.
    """
    if SPREAD:
        i_first = i_work - gl.program_id(0)
        turned = i_first + (gl.program_id(0) + i_round) % gl.num_programs(0)
        i_work = gl.where(i_first + gl.num_programs(0) <= n_work, turned, i_work)
    return i_work


@gluon.jit
def _reach(i_m, n_queries, n_keys, right, SIZES: gl.constexpr, ROWS: gl.constexpr, MAY_BE_PAST: gl.constexpr):
    """Of ROWS queries from i_m on: tiles of keys to visit, one at least, and how many of them need no mask.

    MAY_BE_PAST: the first query may be past the end.
    """
    BLOCK_N: gl.constexpr = SIZES[1]
    stop = n_keys
    if MAY_BE_PAST:
        stop = gl.where(i_m < n_queries, n_keys, 0)
    full = stop
    if SIZES[2]:
        shift = n_keys - n_queries if SIZES[3] else 0 * n_keys
        stop = gl.minimum(stop, gl.minimum(i_m + ROWS, n_queries) + shift + right)
        full = gl.minimum(full, i_m + shift + right + 1)
    return gl.maximum((stop + BLOCK_N - 1) // BLOCK_N, 1), gl.maximum(full, 0) // BLOCK_N


@gluon.jit
def _work(i_work, sizes, lengths, packing, SIZES: gl.constexpr, WARPS: gl.constexpr):
    """`kernels.hopper.order.work_item`, where it lies, and how far the keys of that tile of queries reach.

    Returns:
        batch, head, first query; tiles of keys to visit (one at least), and how many of them, the first ones,
        need no mask; the first query and key of the segment, and how many it has of each. An empty slot's
        first query is past the segment's end: one tile of keys is worked on, and nothing is written.
    """
    _n_work, n_tiles, n_rows, section, n_heads = sizes
    n_queries, n_keys, right = lengths
    p_cu_q, p_cu_k, n_segments = packing
    BLOCK_M: gl.constexpr = SIZES[0]
    i_section = i_work // (section * n_tiles)
    heads_here = gl.minimum(section, n_rows - i_section * section)
    i_local = i_work - i_section * section * n_tiles
    i_bh = i_section * section + i_local % heads_here
    i_t = n_tiles - 1 - i_local // heads_here
    q_start = 0
    k_start = 0
    if SIZES[6]:
        i_s, i_t = _segment(i_t, p_cu_q, n_segments, BLOCK_M, WARPS)
        q_start, n_queries = _bounds(i_s, p_cu_q, n_queries)
        k_start, n_keys = _bounds(i_s, p_cu_k, n_keys)
    i_m = i_t * BLOCK_M
    n_visited, n_full = _reach(i_m, n_queries, n_keys, right, SIZES, BLOCK_M, SIZES[6])
    return i_bh // n_heads, i_bh % n_heads, i_m, n_visited, n_full, q_start, k_start, n_queries, n_keys


@gluon.jit
def _load(
    descriptors, rings, barriers, sizes, lengths, packing, group,
    SIZES: gl.constexpr, STAGES: gl.constexpr, FP8: gl.constexpr,
):  # fmt: skip
    """Role of one warp: queries, keys and values into shared memory, as far ahead as the rings allow."""
    d_q, d_k, d_v, d_q2, d_k2, d_v2 = descriptors
    q_ring, k_ring, v_ring, q_ring2, k_ring2, v_ring2 = rings
    q_full, q_empty, k_full, k_empty, v_full, v_empty, _turns, _cleared = barriers
    GROUPS: gl.constexpr = SIZES[0] // _GROUP_ROWS
    BLOCK_N: gl.constexpr = SIZES[1]
    SECOND: gl.constexpr = SIZES[4]
    TWO: gl.constexpr = SIZES[5] > 0
    q_bytes: gl.constexpr = d_q.block_type.nbytes + (d_q2.block_type.nbytes if TWO else 0)
    k_bytes: gl.constexpr = d_k.block_type.nbytes + (d_k2.block_type.nbytes if TWO else 0)
    v_bytes: gl.constexpr = d_v.block_type.nbytes + (d_v2.block_type.nbytes if TWO else 0)
    done = 0
    i_round = 0
    for i_work in range(gl.program_id(0), sizes[0], gl.num_programs(0)):
        i_item = _spread(i_work, i_round, sizes[0], SIZES[7])
        i_b, i_h, i_m, n_visited, _, q_start, k_start, _, _ = _work(i_item, sizes, lengths, packing, SIZES, 1)
        i_hk = i_h // group
        for i_g in gl.static_range(GROUPS):
            mbarrier.wait(q_empty.index(i_g), (i_round & 1) ^ 1)
            mbarrier.expect(q_full.index(i_g), q_bytes)
            row = q_start + i_m + i_g * _GROUP_ROWS
            _copy_tile(d_q, [i_b, i_h, row, 0], q_full.index(i_g), q_ring.index(i_g))
            if TWO:
                _copy_tile(d_q2, [i_b, i_h, row, SECOND], q_full.index(i_g), q_ring2.index(i_g))
        for i in range(n_visited):
            slot = (done + i) % STAGES
            phase = ((done + i) // STAGES) & 1
            row = k_start + i * BLOCK_N
            mbarrier.wait(k_empty.index(slot), phase ^ 1)
            mbarrier.expect(k_full.index(slot), k_bytes)
            _copy_tile(d_k, [i_b, i_hk, row, 0], k_full.index(slot), k_ring.index(slot))
            if TWO:
                _copy_tile(d_k2, [i_b, i_hk, row, SECOND], k_full.index(slot), k_ring2.index(slot))
            mbarrier.wait(v_empty.index(slot), phase ^ 1)
            mbarrier.expect(v_full.index(slot), v_bytes)
            place = [i_b, i_hk, 0, row] if FP8 else [i_b, i_hk, row, 0]
            _copy_tile(d_v, place, v_full.index(slot), v_ring.index(slot))
            if TWO:
                _copy_tile(d_v2, [i_b, i_hk, row, SECOND], v_full.index(slot), v_ring2.index(slot))
        done += n_visited
        i_round += 1  # noqa: SIM113


@gluon.jit
def _take_turn(turns, i_turn, I_GROUP: gl.constexpr, TURNS: gl.constexpr):
    """Wait until the group before has started its products; the first group has the first turn."""
    if TURNS:
        mbarrier.wait(turns.index(I_GROUP), (i_turn & 1) ^ (1 if I_GROUP == 0 else 0))


@gluon.jit
def _give_turn(turns, I_GROUP: gl.constexpr, GROUPS: gl.constexpr, TURNS: gl.constexpr):
    if TURNS:
        mbarrier.arrive(turns.index((I_GROUP + 1) % GROUPS))


@gluon.jit
def _softmax_step(s, sigma, m_i, l_i, SUBTRACT_FIRST: gl.constexpr, LIFT: gl.constexpr):
    """`kernels.softmax.online_softmax_step` for a positive factor."""
    top = gl.max(s, 1)
    if SUBTRACT_FIRST:
        m_new = gl.maximum(m_i, top)
        m_base = gl.where(m_new == float("-inf"), 0.0, m_new)
        p = gl.exp2((s - m_base[:, None]) * sigma)
        alpha = gl.exp2((m_i - m_base) * sigma)
    else:
        m_new = gl.maximum(m_i, top * sigma if LIFT == 0.0 else gl.fma(top, sigma, -LIFT))
        m_base = gl.where(m_new == float("-inf"), 0.0, m_new)
        p = gl.exp2(gl.fma(s, sigma, -m_base[:, None]))
        alpha = gl.exp2(m_i - m_base)
    return p, alpha, m_new, l_i * alpha + gl.sum(p, 1)


@gluon.jit
def _last_seen(o_m, n_queries, n_keys, right, SIZES: gl.constexpr):
    """The last key that each query sees; -1 past the queries' end."""
    last = gl.where(o_m < n_queries, n_keys - 1, -1)
    if SIZES[2]:
        shift = n_keys - n_queries if SIZES[3] else 0 * n_keys
        last = gl.minimum(last, o_m + shift + right)
    return last


@gluon.jit
def _head_sigma(sigma, factors, i_b, i_h, n_heads, group, SCALED: gl.constexpr):
    """`kernels.tiles.head_factors` for a positive factor; the index of the head's keys among all."""
    i_kv = i_b * (n_heads // group) + i_h // group
    if SCALED:
        q_factor = gl.load(factors[0] + i_b * n_heads + i_h)
        k_factor = gl.load(factors[1] + i_kv)
        sigma = sigma * gl.maximum(q_factor, k_factor) * gl.minimum(q_factor, k_factor)
        sigma = gl.maximum(sigma, 1.1754943508222875e-38)
    return sigma, i_kv


@gluon.jit
def _weights(p, dtype: gl.constexpr, layout: gl.constexpr, P_SCALE: gl.constexpr):
    """Probabilities as the first operand; the conversion to fp8 rounds to nearest even and saturates."""
    if P_SCALE != 1.0:
        p = p * P_SCALE
    return gl.convert_layout(p.to(dtype), layout)


@gluon.jit
def _weights_in_pairs(p, dtype: gl.constexpr, layout: gl.constexpr):
    """`_weights` of 16 bits that are packed where they are converted.

    Weights that go round a loop are packed before their product otherwise, and in the wrong order: 32
    instructions a turn swap the halves.
    """
    if dtype == gl.bfloat16:
        b_p = gl.inline_asm_elementwise("cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [p], gl.bfloat16, True, 2)
    else:
        b_p = gl.inline_asm_elementwise("cvt.rn.f16x2.f32 $0, $2, $1;", "=r,r,r", [p], gl.float16, True, 2)
    return gl.convert_layout(b_p, layout)


@gluon.jit
def _start_scores(b_q, b_q2, k_ring, k_ring2, slot, nothing, SIZES: gl.constexpr):
    """The queries' products with the keys of a slot, under way."""
    b_k = k_ring.index(slot).reshape([SIZES[1], SIZES[4]]).permute((1, 0))
    scores = warpgroup_mma(b_q, b_k, nothing, use_acc=False, is_async=True)
    if SIZES[5] > 0:
        b_k2 = k_ring2.index(slot).reshape([SIZES[1], SIZES[5]]).permute((1, 0))
        scores = warpgroup_mma(b_q2, b_k2, scores, is_async=True)
    return scores


@gluon.jit
def _start_product(b_p, v_ring, slot, acc, BLOCK_N: gl.constexpr):
    """The weights' product with the values of a slot, under way."""
    WIDTH: gl.constexpr = acc.shape[1]
    of_operand: gl.constexpr = gl.DotOperandLayout(0, acc.type.layout, 2)
    b_v = v_ring.index(slot).reshape([BLOCK_N, WIDTH])
    return warpgroup_mma(gl.convert_layout(b_p, of_operand), b_v, acc, is_async=True)


@gluon.jit
def _clear_rows(ring, slot, rows_inside, BLOCK_N: gl.constexpr, WIDTH: gl.constexpr):
    """Zeros in a slot from row ``rows_inside`` on."""
    of_rows: gl.constexpr = gl.BlockedLayout([1, 8], [32 * 8 // WIDTH, WIDTH // 8], [4, 1], [1, 0])
    tile = ring.index(slot).reshape([BLOCK_N, WIDTH])
    for first in gl.static_range(0, BLOCK_N, _CLEARED_ROWS):
        part = tile.slice(first, _CLEARED_ROWS)
        o_row = first + gl.arange(0, _CLEARED_ROWS, gl.SliceLayout(1, of_rows))[:, None]
        b_x = part.load(of_rows)
        part.store(gl.where(o_row < rows_inside, b_x, gl.zeros_like(b_x)))


@gluon.jit
def _by_row(x, like):
    """A number a row, to be spread over the columns of another tensor."""
    return gl.convert_layout(x, gl.SliceLayout(1, like.type.layout))[:, None]


@gluon.jit
def _store_output(
    p_tile, s_om, acc, l_i, m_any, rows_left, p_factor,
    FIRST: gl.constexpr, D: gl.constexpr, P_SCALE: gl.constexpr, SCALED: gl.constexpr, WHOLE: gl.constexpr,
):  # fmt: skip
    """O of the columns from FIRST on; WHOLE: 16 bytes a thread, by way of shared memory."""
    inverse = 1.0 / l_i  # `kernels.softmax.softmax_output`
    if P_SCALE != 1.0:
        inverse = inverse * (1.0 / P_SCALE)
    b_o = acc * _by_row(inverse, acc)
    if SCALED:
        b_o = b_o * gl.load(p_factor)
    b_o = gl.where(_by_row(m_any, acc), b_o, 0.0)
    if WHOLE:
        WIDTH: gl.constexpr = acc.shape[1]
        of_store: gl.constexpr = gl.BlockedLayout([1, 8], [32 * 8 // WIDTH, WIDTH // 8], [4, 1], [1, 0])
        b_o = gl.convert_layout(b_o.to(p_tile.dtype.element_ty), of_store)
    o_d = FIRST + gl.arange(0, acc.shape[1], gl.SliceLayout(0, b_o.type.layout))[None, :]
    o_row = gl.arange(0, acc.shape[0], gl.SliceLayout(1, b_o.type.layout))[:, None]
    m_write = (o_row < rows_left) & (o_d < D)
    gl.store(p_tile + o_row * s_om + o_d, b_o.to(p_tile.dtype.element_ty), mask=m_write)


@gluon.jit
def _compute(
    common, I_GROUP: gl.constexpr, SIZES: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
    PATH: gl.constexpr,
):  # fmt: skip
    """Role of a group of four warps: 64 queries of each tile."""
    rings, barriers, outputs, factors, sizes, lengths, packing, group, given_sigma = common
    q_ring, k_ring, v_ring, q_ring2, k_ring2, v_ring2 = rings
    q_full, q_empty, k_full, k_empty, v_full, v_empty, turns, cleared = barriers
    p_o, s_ob, s_oh, s_om, p_lse = outputs
    n_heads = sizes[4]
    total, _, right = lengths
    BLOCK_N: gl.constexpr = SIZES[1]
    BLOCK_D: gl.constexpr = SIZES[4]
    BLOCK_D2: gl.constexpr = SIZES[5]
    TWO: gl.constexpr = BLOCK_D2 > 0
    ROWS: gl.constexpr = _GROUP_ROWS
    GROUPS: gl.constexpr = SIZES[0] // ROWS
    SLIM: gl.constexpr = GROUPS > 2
    OWN: gl.constexpr = SIZES[8]
    SUBTRACT_FIRST: gl.constexpr = PATH[0]
    P_SCALE: gl.constexpr = PATH[1]
    PROMOTE: gl.constexpr = PATH[2]
    SCALED: gl.constexpr = PATH[3]
    TURNS: gl.constexpr = PATH[4]
    LIFT: gl.constexpr = PATH[5]
    dtype: gl.constexpr = k_ring.dtype
    FP8: gl.constexpr = dtype.primitive_bitwidth == 8
    DEPTH: gl.constexpr = 256 // dtype.primitive_bitwidth
    of_scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, DEPTH])
    of_output: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_D, DEPTH])
    of_operand: gl.constexpr = gl.DotOperandLayout(0, of_output, 32 // dtype.primitive_bitwidth)
    of_rows: gl.constexpr = gl.SliceLayout(1, of_scores)
    of_output_rows: gl.constexpr = gl.SliceLayout(1, of_output)
    of_output2: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_D2 if TWO else 8, DEPTH])
    o_n = gl.arange(0, BLOCK_N, gl.SliceLayout(0, of_scores))[None, :]
    nothing = gl.zeros([ROWS, BLOCK_N], gl.float32, of_scores)
    nothing_yet = gl.zeros([ROWS, BLOCK_D], gl.float32, of_output)
    done = 0
    i_round = 0
    n_cleared = 0
    for i_work in range(gl.program_id(0), sizes[0], gl.num_programs(0)):
        i_item = _spread(i_work, i_round, sizes[0], SIZES[7])
        i_b, i_h, i_m, n_visited, n_full, q_start, _, n_queries, n_keys = _work(
            i_item, sizes, lengths, packing, SIZES, 4
        )
        sigma, i_kv = _head_sigma(given_sigma, factors, i_b, i_h, n_heads, group, SCALED)
        i_m += I_GROUP * ROWS
        n_loaded = n_visited
        if OWN:
            n_visited, n_full = _reach(i_m, n_queries, n_keys, right, SIZES, ROWS, True)
        o_m = i_m + gl.arange(0, ROWS, of_rows)
        last = _last_seen(o_m, n_queries, n_keys, right, SIZES)[:, None]
        acc = gl.zeros([ROWS, BLOCK_D], gl.float32, of_output)
        acc2 = gl.zeros([ROWS, BLOCK_D2], gl.float32, of_output2) if TWO else acc
        m_i = gl.full([ROWS], float("-inf"), gl.float32, of_rows)
        l_i = gl.zeros([ROWS], gl.float32, of_rows)
        mbarrier.wait(q_full.index(I_GROUP), i_round & 1)
        b_q = q_ring.index(I_GROUP).reshape([ROWS, BLOCK_D])
        b_q2 = q_ring2.index(I_GROUP).reshape([ROWS, BLOCK_D2]) if TWO else b_q

        slot = done % STAGES
        mbarrier.wait(k_full.index(slot), (done // STAGES) & 1)
        _take_turn(turns, done, I_GROUP, TURNS)
        scores = _start_scores(b_q, b_q2, k_ring, k_ring2, slot, nothing, SIZES)
        _give_turn(turns, I_GROUP, GROUPS, TURNS)
        s = warpgroup_mma_wait(0, deps=(scores,))
        mbarrier.arrive(k_empty.index(slot))
        if FP8:
            # Weights of 8 bits do not go round the loop, where they would be unpacked and packed again; nor
            # does a product, or the assembler waits for each of its instructions. A turn is softmax, product
            # with the values, and the next scores, beside which the product is collected.
            n_before = n_visited - 1
            n_plain = gl.minimum(n_full, n_before)
            for i_part in gl.static_range(2):
                part_start = 0 if i_part == 0 else n_plain
                part_stop = n_plain if i_part == 0 else n_before
                for i in range(part_start, part_stop):
                    if i_part == 1:
                        s = gl.where(i * BLOCK_N + o_n <= last, s, float("-inf"))
                    p, alpha, m_i, l_i = _softmax_step(s, sigma, m_i, l_i, SUBTRACT_FIRST, LIFT)
                    b_p = _weights(p, dtype, of_operand, P_SCALE)
                    slot = (done + i) % STAGES
                    after = (done + i + 1) % STAGES
                    mbarrier.wait(v_full.index(slot), ((done + i) // STAGES) & 1)
                    b_v = v_ring.index(slot).reshape([BLOCK_D, BLOCK_N]).permute((1, 0))
                    factor = gl.convert_layout(alpha, of_output_rows)[:, None]
                    base = nothing_yet if PROMOTE else acc * factor
                    if TURNS:
                        mbarrier.wait(k_full.index(after), ((done + i + 1) // STAGES) & 1)
                    _take_turn(turns, done + i + 1, I_GROUP, TURNS)
                    product = warpgroup_mma(b_p, b_v, base, use_acc=not PROMOTE, is_async=True)
                    if not TURNS:
                        mbarrier.wait(k_full.index(after), ((done + i + 1) // STAGES) & 1)
                    b_k = k_ring.index(after).reshape([BLOCK_N, BLOCK_D]).permute((1, 0))
                    scores = warpgroup_mma(b_q, b_k, nothing, use_acc=False, is_async=True)
                    _give_turn(turns, I_GROUP, GROUPS, TURNS)
                    b_pv = warpgroup_mma_wait(1, deps=(product,))
                    mbarrier.arrive(v_empty.index(slot))
                    # A tile's sum starts from zero in the matrix unit; fp32 adds it to the rest.
                    acc = gl.fma(acc, factor, b_pv) if PROMOTE else b_pv
                    s = warpgroup_mma_wait(0, deps=(scores,))
                    mbarrier.arrive(k_empty.index(after))
            mbarrier.arrive(q_empty.index(I_GROUP))
            slot = (done + n_before) % STAGES
            if n_full < n_visited:
                s = gl.where(o_n <= last - n_before * BLOCK_N, s, float("-inf"))
            p, alpha, m_i, l_i = _softmax_step(s, sigma, m_i, l_i, SUBTRACT_FIRST, LIFT)
            b_p = _weights(p, dtype, of_operand, P_SCALE)
            mbarrier.wait(v_full.index(slot), ((done + n_before) // STAGES) & 1)
            b_v = v_ring.index(slot).reshape([BLOCK_D, BLOCK_N]).permute((1, 0))
            factor = gl.convert_layout(alpha, of_output_rows)[:, None]
            base = nothing_yet if PROMOTE else acc * factor
            product = warpgroup_mma(b_p, b_v, base, use_acc=not PROMOTE, is_async=True)
            b_pv = warpgroup_mma_wait(0, deps=(product,))
            mbarrier.arrive(v_empty.index(slot))
            acc = gl.fma(acc, factor, b_pv) if PROMOTE else b_pv
        else:
            if n_full == 0:
                s = gl.where(o_n <= last, s, float("-inf"))
            p, alpha, m_i, l_i = _softmax_step(s, sigma, m_i, l_i, SUBTRACT_FIRST, LIFT)
            b_p = _weights_in_pairs(p, dtype, of_operand) if SLIM else _weights(p, dtype, of_operand, P_SCALE)
            # Tiles that all rows see, and the others. A turn starts the scores of its keys and the product
            # with the values of the keys before; the softmax runs beside the latter.
            for i_part in gl.static_range(2):
                part_start = 1 if i_part == 0 else gl.maximum(n_full, 1)
                part_stop = n_full if i_part == 0 else n_visited
                for i in range(part_start, part_stop):
                    slot = (done + i) % STAGES
                    before = (done + i - 1) % STAGES
                    mbarrier.wait(k_full.index(slot), ((done + i) // STAGES) & 1)
                    if TURNS:
                        mbarrier.wait(v_full.index(before), ((done + i - 1) // STAGES) & 1)
                    _take_turn(turns, done + i, I_GROUP, TURNS)
                    scores = _start_scores(b_q, b_q2, k_ring, k_ring2, slot, nothing, SIZES)
                    if not TURNS:
                        mbarrier.wait(v_full.index(before), ((done + i - 1) // STAGES) & 1)
                    product = _start_product(b_p, v_ring, before, acc, BLOCK_N)
                    if TWO:
                        product2 = _start_product(b_p, v_ring2, before, acc2, BLOCK_N)
                    _give_turn(turns, I_GROUP, GROUPS, TURNS)
                    s = warpgroup_mma_wait(2 if TWO else 1, deps=(scores,))
                    mbarrier.arrive(k_empty.index(slot))
                    if i_part == 1:
                        s = gl.where(i * BLOCK_N + o_n <= last, s, float("-inf"))
                    p, alpha, m_i, l_i = _softmax_step(s, sigma, m_i, l_i, SUBTRACT_FIRST, LIFT)
                    # The weights are named so that their registers stay as they are until they were read.
                    if SLIM:
                        if TWO:
                            acc, acc2, b_p, p = warpgroup_mma_wait(0, deps=(product, product2, b_p, p))
                        else:
                            acc, b_p, p = warpgroup_mma_wait(0, deps=(product, b_p, p))
                        b_next = _weights_in_pairs(p, dtype, of_operand)
                    else:
                        b_next = _weights(p, dtype, of_operand, P_SCALE)
                        if TWO:
                            acc, acc2, b_p = warpgroup_mma_wait(0, deps=(product, product2, b_p))
                        else:
                            acc, b_p = warpgroup_mma_wait(0, deps=(product, b_p))
                    if TWO:
                        acc2 = acc2 * _by_row(alpha, acc2)
                    mbarrier.arrive(v_empty.index(before))
                    acc = acc * _by_row(alpha, acc)
                    b_p = b_next
            mbarrier.arrive(q_empty.index(I_GROUP))
            slot = (done + n_visited - 1) % STAGES
            mbarrier.wait(v_full.index(slot), ((done + n_visited - 1) // STAGES) & 1)
            if SIZES[6]:
                # Weights of the next segment's keys are zero, but zero times their NaN is not.
                rows_inside = n_keys - (n_visited - 1) * BLOCK_N
                if rows_inside < BLOCK_N:
                    # The first group clears them for all. Another may be one clearing behind, not two: the
                    # keys of a tile of queries are loaded only when all have read the queries before.
                    # So two barriers that take turns tell clearings apart.
                    if I_GROUP == 0:
                        _clear_rows(v_ring, slot, rows_inside, BLOCK_N, BLOCK_D)
                        if TWO:
                            _clear_rows(v_ring2, slot, rows_inside, BLOCK_N, BLOCK_D2)
                        fence_async_shared()
                        mbarrier.arrive(cleared.index(n_cleared & 1))
                    else:
                        mbarrier.wait(cleared.index(n_cleared & 1), (n_cleared >> 1) & 1)
                    n_cleared += 1
            product = _start_product(b_p, v_ring, slot, acc, BLOCK_N)
            if TWO:
                product2 = _start_product(b_p, v_ring2, slot, acc2, BLOCK_N)
                acc, acc2, b_p = warpgroup_mma_wait(0, deps=(product, product2, b_p))
            else:
                acc, b_p = warpgroup_mma_wait(0, deps=(product, b_p))
            mbarrier.arrive(v_empty.index(slot))
        done += n_visited
        i_round += 1  # noqa: SIM113

        # The mask says whether a row is empty, not m_i: see the portable kernel.
        reach = o_m * 0 + n_keys - 1
        if SIZES[2]:
            shift = n_keys - n_queries if SIZES[3] else 0 * n_keys
            reach = gl.minimum(reach, o_m + shift + right)
        m_any = reach >= 0
        top = m_i * sigma if SUBTRACT_FIRST else m_i
        lse = gl.where(m_any, (top + gl.log2(l_i)) * _LN2, float("-inf"))
        o_lse = (i_b * n_heads + i_h).to(gl.int64) * total + q_start + o_m
        gl.store(p_lse + o_lse, lse, mask=o_m < n_queries)
        p_tile = p_o + i_b.to(gl.int64) * s_ob + i_h.to(gl.int64) * s_oh + (q_start + i_m).to(gl.int64) * s_om
        p_factor = factors[2] + i_kv if SCALED else p_o
        rows_left = n_queries - i_m
        _store_output(p_tile, s_om, acc, l_i, m_any, rows_left, p_factor, 0, D, P_SCALE, SCALED, SLIM)
        if TWO:
            _store_output(
                p_tile, s_om, acc2, l_i, m_any, rows_left, p_factor, BLOCK_D, D, P_SCALE, SCALED, SLIM
            )
        if OWN:
            # What is loaded for the other groups alone: slots are free when all groups say so.
            for _ in range(n_visited, n_loaded):
                slot = done % STAGES
                mbarrier.wait(k_full.index(slot), (done // STAGES) & 1)
                mbarrier.arrive(k_empty.index(slot))
                mbarrier.wait(v_full.index(slot), (done // STAGES) & 1)
                mbarrier.arrive(v_empty.index(slot))
                done += 1


@gluon.jit(
    do_not_specialize=[
        "n_work", "n_tiles", "n_rows", "section", "n_queries", "n_keys", "right", "n_segments",
    ]
)  # fmt: skip
def _hopper_pipelined_kernel(
    d_q, d_k, d_v, d_q2, d_k2, d_v2, p_o, s_ob, s_oh, s_om, p_lse, p_qf, p_kf, p_vf,
    n_work, n_tiles, n_rows, section, n_heads, group, n_queries, n_keys, sigma, right,
    p_cu_q, p_cu_k, n_segments,
    D: gl.constexpr, BLOCK_D: gl.constexpr, BLOCK_D2: gl.constexpr, BLOCK_N: gl.constexpr,
    GROUPS: gl.constexpr, STAGES: gl.constexpr,
    HAS_RIGHT: gl.constexpr, BOTTOM_RIGHT: gl.constexpr, SUBTRACT_FIRST: gl.constexpr, P_SCALE: gl.constexpr,
    LIFT: gl.constexpr, PROMOTE: gl.constexpr, SCALED: gl.constexpr, TURNS: gl.constexpr,
    PACKED: gl.constexpr,
):  # fmt: skip
    FP8: gl.constexpr = d_v.dtype.primitive_bitwidth == 8
    PATH: gl.constexpr = (SUBTRACT_FIRST, P_SCALE, PROMOTE, SCALED, TURNS, LIFT)
    # Groups that take turns, or wait for the first one's clearing, all go through the same tiles.
    OWN: gl.constexpr = GROUPS > 2 and not TURNS and not PACKED
    # Under a mask the longest come first, all programs' alike.
    SPREAD: gl.constexpr = GROUPS > 2 and not HAS_RIGHT
    SIZES: gl.constexpr = (
        GROUPS * _GROUP_ROWS, BLOCK_N, HAS_RIGHT, BOTTOM_RIGHT, BLOCK_D, BLOCK_D2, PACKED, SPREAD, OWN
    )  # fmt: skip
    q_ring = gl.allocate_shared_memory(d_q.dtype, [GROUPS, 1, 1, _GROUP_ROWS, BLOCK_D], d_q.layout)
    k_ring = gl.allocate_shared_memory(d_k.dtype, [STAGES, 1, 1, BLOCK_N, BLOCK_D], d_k.layout)
    rows: gl.constexpr = BLOCK_D if FP8 else BLOCK_N
    columns: gl.constexpr = BLOCK_N if FP8 else BLOCK_D
    v_ring = gl.allocate_shared_memory(d_v.dtype, [STAGES, 1, 1, rows, columns], d_v.layout)
    q_ring2 = q_ring
    k_ring2 = k_ring
    v_ring2 = v_ring
    if BLOCK_D2 > 0:
        q_ring2 = gl.allocate_shared_memory(d_q.dtype, [GROUPS, 1, 1, _GROUP_ROWS, BLOCK_D2], d_q2.layout)
        k_ring2 = gl.allocate_shared_memory(d_k.dtype, [STAGES, 1, 1, BLOCK_N, BLOCK_D2], d_k2.layout)
        v_ring2 = gl.allocate_shared_memory(d_v.dtype, [STAGES, 1, 1, BLOCK_N, BLOCK_D2], d_v2.layout)
    q_full = gl.allocate_shared_memory(gl.int64, [GROUPS, 1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [GROUPS, 1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    turns = q_full
    if TURNS:
        turns = gl.allocate_shared_memory(gl.int64, [GROUPS, 1], mbarrier.MBarrierLayout())
        for i in gl.static_range(GROUPS):
            mbarrier.init(turns.index(i), 1)
    cleared = q_full
    if PACKED:
        cleared = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
        for i in gl.static_range(2):
            mbarrier.init(cleared.index(i), 1)
    for i in gl.static_range(GROUPS):
        mbarrier.init(q_full.index(i), 1)
        mbarrier.init(q_empty.index(i), 1)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), 1)
        mbarrier.init(v_full.index(i), 1)
        mbarrier.init(k_empty.index(i), GROUPS)
        mbarrier.init(v_empty.index(i), GROUPS)
    rings = (q_ring, k_ring, v_ring, q_ring2, k_ring2, v_ring2)
    barriers = (q_full, q_empty, k_full, k_empty, v_full, v_empty, turns, cleared)
    sizes = (n_work, n_tiles, n_rows, section, n_heads)
    descriptors = (d_q, d_k, d_v, d_q2, d_k2, d_v2)
    outputs = (p_o, s_ob, s_oh, s_om, p_lse)
    lengths = (n_queries, n_keys, right)
    factors = (p_qf, p_kf, p_vf)
    packing = (p_cu_q, p_cu_k, n_segments)
    common = (rings, barriers, outputs, factors, sizes, lengths, packing, group, sigma)
    # Registers of each group but the first, which has what is left, and of the loader.
    if GROUPS == 2:
        gl.warp_specialize(
            [
                (_compute, (common, 0, SIZES, D, STAGES, PATH)),
                (_compute, (common, 1, SIZES, D, STAGES, PATH)),
                (_load, (descriptors, rings, barriers, sizes, lengths, packing, group, SIZES, STAGES, FP8)),
            ],
            [4, 1],
            [240, 24],
        )
    elif GROUPS == 3:
        gl.warp_specialize(
            [
                (_compute, (common, 0, SIZES, D, STAGES, PATH)),
                (_compute, (common, 1, SIZES, D, STAGES, PATH)),
                (_compute, (common, 2, SIZES, D, STAGES, PATH)),
                (_load, (descriptors, rings, barriers, sizes, lengths, packing, group, SIZES, STAGES, FP8)),
            ],
            [4, 4, 1],
            [160, 160, 24],
        )
    else:
        gl.static_assert(GROUPS == 4)
        gl.warp_specialize(
            [
                (_compute, (common, 0, SIZES, D, STAGES, PATH)),
                (_compute, (common, 1, SIZES, D, STAGES, PATH)),
                (_compute, (common, 2, SIZES, D, STAGES, PATH)),
                (_compute, (common, 3, SIZES, D, STAGES, PATH)),
                (_load, (descriptors, rings, barriers, sizes, lengths, packing, group, SIZES, STAGES, FP8)),
            ],
            [4, 4, 4, 1],
            [112, 112, 112, 24],
        )


def pipelined_possible(options: Options) -> bool:
    """Whether the kernel covers a call that `kernels.hopper.calls.possible` accepts."""
    return options.left is None and options.sigma > 0


def _descriptor(x: Tensor, rows: int, columns: int) -> TensorDescriptor:
    block = [1, 1, rows, columns]
    layout = gl.NVMMASharedLayout.get_default_for(block, _ELEMENT[x.dtype])
    strides = [s if n > 1 else 256 for n, s in zip(x.shape[:3], x.stride()[:3], strict=True)]
    return TensorDescriptor(x, list(x.shape), [*strides, 1], block, layout)


def launch_hopper_pipelined(
    operands: Operands,
    options: Options,
    path: ScorePath,
    tile: Tile,
    section: int | None = None,
    persistent: bool = False,
    programs: int | None = None,
    turns: bool = False,
) -> tuple[Tensor, Tensor]:
    """O and the natural log-sum-exp of a call that `pipelined_possible` accepts, beside `possible`.

    Operands are 16-bit, or fp8 with v's keys contiguous (`kernels.hopper.calls.fp8_possible`).

    Args:
        tile: ``block_m`` is 64 a group of warps (128, 192 or 256), ``num_warps`` 4 a group (those that
            compute), ``num_stages`` the tiles of a ring.
        section: heads that run side by side (`kernels.hopper.order`).
        persistent: one program a multiprocessor, which takes several tiles in turn.
        programs: if persistent, how many instead.
        turns: the groups start their products in turn, so that one multiplies while the other exponentiates.
    """
    q, k, v = operands.q, operands.k, operands.v
    batch, heads, num_queries, head_dim = q.shape
    out = torch.empty(q.shape, dtype=path.output, device=q.device)
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)

    def make() -> Launch:
        group = heads // k.shape[1]
        side_by_side = section
        if side_by_side is None:
            banded = options.right is not None
            side_by_side = section_heads(k, options.longest_k, group, batch * heads) if banded else group
        num_tiles = tiles_of(q, tile.block_m, options)
        work = num_tiles * batch * heads
        most = programs
        if most is None and q.device.type == "cuda":
            most = torch.cuda.get_device_properties(q.device).multi_processor_count
        rows, fp8 = _GROUP_ROWS.value, path.operand in FP8
        first, width2 = parts(head_dim, q.element_size())
        second: list[TensorDescriptor | None] = [None, None, None]
        if width2:
            second = [_descriptor(x, n, width2) for x, n in ((q, rows), (k, tile.block_n), (v, tile.block_n))]
        return Launch(
            work if not persistent or most is None else min(work, most),
            (
                _descriptor(q, rows, first),
                _descriptor(k, tile.block_n, first),
                _descriptor(v.mT, first, tile.block_n) if fp8 else _descriptor(v, tile.block_n, first),
                *second,
            ),
            (
                (
                    work,
                    num_tiles,
                    batch * heads,
                    side_by_side,
                    heads,
                    group,
                    num_queries,
                    k.shape[2],
                    options.sigma,
                    options.right or 0,
                ),
                (options.segments,),
            ),
            {
                "D": head_dim,
                "BLOCK_D": first,
                "BLOCK_D2": width2,
                "BLOCK_N": tile.block_n,
                "GROUPS": tile.block_m // rows,
                "STAGES": tile.num_stages,
                "HAS_RIGHT": options.right is not None,
                "BOTTOM_RIGHT": options.bottom_right,
                **softmax_constants(path, head_dim, options.plain_sigma),
                "PROMOTE": path.promote,
                "SCALED": path.scales_mode == 1,
                "TURNS": turns,
                "PACKED": options.cu_q is not None,
                "num_warps": 4,
            },
        )

    factors = (operands.q_factor, operands.k_factor, operands.v_factor)
    layouts = [None if x is None else layout(x) for x in (q, k, v, *factors)]
    how = (tile, section, path, persistent, programs, turns)
    with device_of(q):
        launch = remembered(options.launches, ("pipelined", *how, q.get_device(), *layouts), make)
        described = (q, k, v, q, k, v)
        before = (out, *out.stride()[:3], lse, *factors)
        launch.run(_hopper_pipelined_kernel, described, before, (), ends(options))
    return out, lse
