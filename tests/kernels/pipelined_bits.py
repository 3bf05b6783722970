"""The Gluon forward against `kernels.hopper.forward`, bit by bit, where a GPU can run it; for on_gpu.py."""

import itertools
from dataclasses import replace

import torch

from kernels.hopper.forward import launch_hopper_products
from kernels.hopper.pipelined import launch_hopper_pipelined, pipelined_possible
from kernels.options import parse_options
from kernels.quantise import columns, prepare
from kernels.score_path import FP8, parse_score_path
from kernels.tuning import Tile
from tests.kernels.attention import inputs

E4M3 = torch.float8_e4m3fn
# (dtype, score, head dim, keys a tile, stages[, groups of warps])
CASES = [
    (torch.bfloat16, None, 128, 128, 2),
    (torch.bfloat16, None, 128, 64, 3),
    (torch.float16, None, 128, 128, 2),
    (torch.bfloat16, None, 96, 128, 2),
    (torch.float16, None, 72, 64, 4),
    (torch.float16, None, 192, 64, 3),
    (torch.bfloat16, None, 136, 64, 2),
    (torch.bfloat16, None, 64, 128, 3),
    (torch.bfloat16, None, 64, 128, 3, 3),
    (torch.float16, None, 64, 128, 3, 3),
    (torch.bfloat16, None, 64, 64, 4, 4),
    (torch.float16, None, 48, 64, 4, 4),
    (E4M3, None, 128, 128, 3),
    (torch.bfloat16, "e4m3", 128, 128, 2),
    (E4M3, None, 64, 128, 4),
]
# Packed segments, some of them NaN: (dtype, "packed", head dim, keys a tile, stages)
CASES += [
    (torch.bfloat16, "packed", 128, 64, 3),
    (torch.bfloat16, "packed", 128, 128, 2),
    (torch.float16, "packed", 96, 64, 2),
    (torch.bfloat16, "packed", 192, 64, 2),
    (torch.float16, "packed", 64, 64, 4),
    (torch.bfloat16, "packed", 64, 128, 3, 3),
]
LENGTHS = [(1, 1), (1, 300), (300, 1), (64, 128), (65, 127), (150, 90), (129, 400), (1000, 1500)]
SEGMENTS = [
    ([37, 0, 1, 300, 128, 16, 5], [50, 3, 0, 290, 128, 40, 70]),
    ([64, 400, 33, 20], [32, 600, 1, 30]),
    ([1] * 70, [2] * 70),  # more than one chunk of the search
]
OPTIONS = [{}, {"causal": "top_left"}, {"causal": "bottom_right"}, {"window": (None, 30), "scale": 0.4}]


def differences(case, device):
    """Which calls give other bits, as text; programs take one tile or several, groups take turns or not."""
    dtype, score, d, keys, stages, groups = [*case, 2][:6]
    path = parse_score_path(dtype, None if score == "packed" else score, None, None, False, True, False)
    wrong = []
    for lengths, options in itertools.product(SEGMENTS if score == "packed" else LENGTHS, OPTIONS):
        (q, k, v), packing = (
            packed(dtype, d, lengths, device) if score == "packed" else whole(dtype, d, lengths, device)
        )
        parsed = parse_options(q, k, **options, **packing)
        assert pipelined_possible(parsed)
        operands = prepare(q, k, v, parsed, path)
        if path.operand in FP8:
            operands = replace(operands, v=columns(operands.v))
        expected = launch_hopper_products(operands, parsed, path, Tile(64, keys, 4, 2))
        tile = Tile(64 * groups, keys, 4 * groups, stages)
        for programs, turns in itertools.product((0, 1, 5, 132), (False, True)):  # 0: one a tile of queries
            how = {"persistent": programs > 0, "programs": programs, "turns": turns}
            got = launch_hopper_pipelined(operands, parsed, path, tile, **how)
            for name, x, y in zip(("out", "lse"), got, expected, strict=True):
                # Bits: rows without a key have a log-sum-exp of -inf. Where the maximum is a product, its
                # rounding may be fused away in one kernel and not in the other: one in each of two sums.
                fused = name == "lse" and path.subtract_first
                room = 4 * 2.0**-24 * y.abs().clamp(1.0, 1e30) if fused else 0.0
                same = (x == y) | ((x.float() - y.float()).abs() <= room) | (x.isnan() & y.isnan())
                if not bool(same.all()):
                    far = float((x.float() - y.float()).nan_to_num().abs().max())
                    wrong.append(f"{lengths} {options} {how} {name}: {int((~same).sum())}, {far:.3g}")
    return wrong


def whole(dtype, d, lengths, device):
    """q, k and v of a batch, and no packing."""
    sizes = {"batch": 2, "heads": 6, "kv_heads": 2, "nq": lengths[0], "nk": lengths[1], "d": d}
    return [x.to(dtype) for x in inputs(device, torch.float32 if dtype == E4M3 else dtype, **sizes)], {}


def packed(dtype, d, lengths, device):
    """q, k and v of segments, the last and every third of them NaN, and where they start."""
    q, k, v = inputs(device, dtype, batch=1, heads=6, kv_heads=2, nq=sum(lengths[0]), nk=sum(lengths[1]), d=d)
    ends = [torch.tensor([0, *itertools.accumulate(x)], dtype=torch.int32, device=device) for x in lengths]
    for x, starts in ((q, ends[0]), (k, ends[1]), (v, ends[1])):
        for i in {*range(2, len(starts) - 1, 3), len(starts) - 2}:
            x[:, :, int(starts[i]) : int(starts[i + 1])] = torch.nan
    return [q, k, v], {"cu_seqlens_q": ends[0], "cu_seqlens_k": ends[1]}
