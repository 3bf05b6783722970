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
# (dtype, score, head dim, keys a tile, stages)
CASES = [
    (torch.bfloat16, None, 128, 128, 2),
    (torch.bfloat16, None, 128, 64, 3),
    (torch.float16, None, 128, 128, 2),
    (torch.bfloat16, None, 96, 128, 2),
    (torch.float16, None, 72, 64, 4),
    (torch.float16, None, 192, 64, 3),
    (torch.bfloat16, None, 136, 64, 2),
    (torch.bfloat16, None, 64, 128, 3),
    (E4M3, None, 128, 128, 3),
    (torch.bfloat16, "e4m3", 128, 128, 2),
    (E4M3, None, 64, 128, 4),
]
LENGTHS = [(1, 1), (1, 300), (300, 1), (64, 128), (65, 127), (150, 90), (129, 400), (1000, 1500)]
OPTIONS = [{}, {"causal": "top_left"}, {"causal": "bottom_right"}, {"window": (None, 30), "scale": 0.4}]


def differences(case, device):
    """Which calls give other bits, as text: with one program a tile, and with programs that take several."""
    dtype, score, d, keys, stages = case
    path = parse_score_path(dtype, score, None, None, False, True, False)
    wrong = []
    for (nq, nk), options in itertools.product(LENGTHS, OPTIONS):
        sizes = {"batch": 2, "heads": 6, "kv_heads": 2, "nq": nq, "nk": nk, "d": d}
        wide = torch.float32 if dtype == E4M3 else dtype
        q, k, v = (x.to(dtype) for x in inputs(device, wide, **sizes))
        parsed = parse_options(q, k, **options)
        assert pipelined_possible(parsed)
        operands = prepare(q, k, v, parsed, path)
        if path.operand in FP8:
            operands = replace(operands, v=columns(operands.v))
        expected = launch_hopper_products(operands, parsed, path, Tile(64, keys, 4, 2))
        for persistent in (0, 1, 5, 132):  # programs; 0: one a tile of queries
            tile = Tile(128, keys, 8, stages)
            got = launch_hopper_pipelined(
                operands, parsed, path, tile, None, persistent > 0, programs=persistent
            )
            for name, x, y in zip(("out", "lse"), got, expected, strict=True):
                # Bits: rows without a key have a log-sum-exp of -inf. Where the maximum is a product, its
                # rounding may be fused away in one kernel and not in the other: one in each of two sums.
                fused = name == "lse" and path.subtract_first
                room = 4 * 2.0**-24 * y.abs().clamp(1.0, 1e30) if fused else 0.0
                if not bool(((x == y) | ((x.float() - y.float()).abs() <= room)).all()):
                    count, far = int((x != y).sum()), float((x.float() - y.float()).nan_to_num().abs().max())
                    wrong.append(f"{nq}x{nk} {options} persistent {persistent} {name}: {count}, {far:.3g}")
    return wrong
