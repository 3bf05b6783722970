"""Launch configurations worth timing, a kernel and head dim.

Taken from what the assembler of Triton 3.6 makes of them for sm90: shapes whose wgmma it serialises or that
spill widely are left out. Backward kernels with 4 warps are here to be timed; whether they may be used is
decided by `kernels.bench.sweep`, which judges every result.
"""

from __future__ import annotations

from collections.abc import Sequence

from kernels.tuning import Tile, padded

KERNELS = ("forward", "dkdv", "dq")
# dK and dV in a launch each, for head dims at which both sums do not fit into registers.
APART = ("dk", "dv")
# The forward besides: with e4m3 inputs, v with keys contiguous (making it so is not timed); and packed bf16
# inputs. As many keys a tile as other options of the same calls have, so that any of them may be entered.
_PIPELINED_KINDS = ("pipelined", "pipelined-fp8", "pipelined-packed")
_WAYS = ("", "-persistent", "-turns", "-turns-persistent")
COMPILED_ONLY = tuple(kind + way for kind in _PIPELINED_KINDS for way in _WAYS)
"""Do not run in the interpreter; persistent: programs take several tiles, turns: their groups of warps."""
OTHERS = ("fp8", "packed", *APART, *COMPILED_ONLY)

_IN_PARTS = (0, 1)
_FP8 = (
    (64, 128, 4, 2),
    (64, 128, 4, 3),
    (64, 128, 4, 4),
    (128, 128, 8, 2),
    (128, 128, 8, 3),
    (128, 128, 8, 4),
)
_PIPELINED = {
    64: (
        (128, 64, 8, 4),
        (128, 128, 8, 2),
        (128, 128, 8, 3),
        (128, 128, 8, 4),
        (192, 64, 12, 4),
        (192, 128, 12, 3),
        (192, 128, 12, 4),
        (256, 64, 16, 4),
    ),
    96: ((128, 128, 8, 2), (128, 128, 8, 3)),
    128: ((128, 64, 8, 2), (128, 64, 8, 3), (128, 64, 8, 4), (128, 128, 8, 2)),
    192: ((128, 64, 8, 2), (128, 64, 8, 3)),
}
_PIPELINED_FP8 = ((128, 128, 8, 2), (128, 128, 8, 3), (128, 128, 8, 4))
# 64 keys a tile as all packed calls have; with 128 those take as many too (`kernels.tuning`).
_PIPELINED_PACKED = ((128, 64, 8, 3), (128, 64, 8, 4), (128, 128, 8, 2))
_PACKED = (
    (64, 64, 4, 2),
    (64, 64, 4, 3),
    (128, 64, 4, 2),
    (128, 64, 4, 3),
    (128, 64, 8, 2),
    (128, 64, 8, 3),
)
_SHAPES: dict[tuple[str, int], tuple[tuple[int, ...], ...]] = {
    # (block_m, block_n, warps, stages[, registers or 0[, in parts]])
    ("forward", 64): (
        (64, 64, 4, 2),
        (64, 64, 4, 3),
        (64, 128, 4, 2),
        (64, 128, 4, 3),
        (128, 32, 4, 3),
        (128, 64, 4, 2),
        (128, 64, 4, 3),
        (128, 64, 4, 4),
        (128, 64, 8, 3),
        (128, 128, 8, 2),
        (128, 128, 8, 3),
    ),
    ("forward", 128): (
        (64, 32, 4, 3),
        (64, 64, 4, 2),
        (64, 64, 4, 3),
        (64, 128, 4, 2),
        (128, 32, 8, 3),
        (128, 32, 8, 4),
        (128, 64, 8, 2),
        (128, 64, 8, 3),
        (128, 64, 8, 4),
        (128, 128, 8, 2),
        (128, 128, 8, 3),
    ),
    ("forward", 256): ((64, 32, 4, 2), (64, 64, 4, 2), (128, 32, 8, 3), (128, 64, 8, 2), (128, 32, 8, 2)),
    ("dkdv", 64): (
        (32, 64, 4, 2),
        (32, 64, 4, 3),
        (32, 128, 8, 2),
        (32, 128, 8, 3),
        (64, 64, 4, 2),
        (64, 64, 8, 2),
        (64, 128, 8, 1),
        (64, 128, 8, 2),
        (64, 128, 8, 3),
        (128, 64, 8, 2),
        (128, 128, 8, 2),
    ),
    ("dkdv", 128): (
        (32, 64, 4, 2),
        (32, 64, 8, 2),
        (32, 128, 8, 1),
        (32, 128, 8, 2),
        (32, 128, 8, 3),
        (64, 64, 4, 2),
        (64, 64, 8, 2),
        (64, 64, 8, 3),
        (64, 128, 8, 1),
        (64, 128, 8, 2),
    ),
    ("dkdv", 256): ((32, 32, 8, 2), (32, 64, 8, 2), (32, 64, 8, 1), (64, 64, 8, 1)),
    ("dq", 64): (
        (64, 64, 4, 2),
        (64, 64, 4, 3),
        (64, 128, 4, 2),
        (128, 64, 4, 2),
        (128, 64, 8, 2),
        (128, 64, 8, 3),
        (128, 64, 8, 4),
        (128, 128, 8, 2),
        (128, 32, 8, 4),
    ),
    ("dq", 128): (
        (64, 64, 4, 2),
        (64, 64, 8, 2),
        (64, 32, 4, 3),
        (128, 32, 8, 2),
        (128, 32, 8, 3),
        (128, 64, 8, 1),
        (128, 64, 8, 2),
        (128, 64, 8, 3),
        (128, 128, 8, 1),
        (128, 128, 8, 2),
    ),
    ("fp8", 64): _FP8,
    ("fp8", 128): _FP8,
    **{(f"pipelined{way}", dim): shapes for way in _WAYS for dim, shapes in _PIPELINED.items()},
    **{(f"pipelined-fp8{way}", dim): _PIPELINED_FP8 for way in _WAYS for dim in (64, 128)},
    **{(f"pipelined-packed{way}", dim): _PIPELINED_PACKED for way in _WAYS for dim in (64, 128)},
    ("packed", 64): _PACKED,
    ("packed", 128): _PACKED,
    ("dq", 256): ((64, 32, 8, 2), (64, 64, 8, 2), (64, 64, 8, 1), (128, 32, 8, 1), (128, 32, 8, 2)),
    ("dk", 256): ((32, 64, 4, 2), (32, 128, 8, 2), (64, 64, 8, 2)),
    ("dv", 256): ((32, 128, 8, 2), (64, 128, 8, 1), (64, 64, 8, 2)),
    # In parts, but for the first, with which they are compared. dq without a spill; of dkdv the one that does
    # not spill and those that spill least; dk and dv do not spill, or (64, 128) of dk only under a band.
    ("dq", 96): (
        (128, 64, 8, 3),
        (128, 64, 8, 3, *_IN_PARTS),
        (128, 64, 8, 2, *_IN_PARTS),
        (128, 128, 8, 2, *_IN_PARTS),
        (64, 64, 4, 3, *_IN_PARTS),
    ),
    ("dkdv", 96): (
        (64, 64, 4, 2),
        (64, 64, 4, 2, *_IN_PARTS),
        (64, 64, 4, 3, *_IN_PARTS),
        (32, 64, 4, 3, *_IN_PARTS),
        (64, 128, 8, 2, *_IN_PARTS),
        (64, 128, 8, 3, *_IN_PARTS),
    ),
    ("dq", 192): (
        (64, 64, 8, 2),
        (128, 64, 8, 2, *_IN_PARTS),
        (128, 32, 8, 2, *_IN_PARTS),
        (128, 32, 8, 3, *_IN_PARTS),
        (64, 64, 4, 2, *_IN_PARTS),
        (64, 64, 8, 2, *_IN_PARTS),
    ),
    ("dkdv", 192): (
        (32, 64, 8, 2),
        (32, 64, 8, 2, *_IN_PARTS),
        (64, 64, 8, 2, *_IN_PARTS),
        (32, 64, 4, 2, *_IN_PARTS),
    ),
    ("dk", 192): (
        (64, 128, 8, 2, *_IN_PARTS),
        (32, 128, 8, 2, *_IN_PARTS),
        (32, 64, 4, 2, *_IN_PARTS),
    ),
    ("dv", 192): (
        (64, 128, 8, 2, *_IN_PARTS),
        (64, 64, 4, 2, *_IN_PARTS),
    ),
}


def candidates(kernel: str, head_dim: int) -> list[Tile]:
    """What to time, for that head dim or else for the power of two that holds it; there may be nothing."""
    shapes = _SHAPES.get((kernel, head_dim)) or _SHAPES.get((kernel, padded(head_dim)), ())
    return [tile_of(shape) for shape in shapes]


# The short list for goals that were missed: (kernel, head dim) -> shapes; all of `_SHAPES` where none stand.
_MISSED: dict[tuple[str, int], tuple[tuple[int, ...], ...]] = {
    # packed / dense: the kernel of dense calls, packed; and what packed calls run now, and dense ones.
    ("pipelined-packed", 128): (),
    ("pipelined-packed-persistent", 128): (),
    ("pipelined-packed-turns", 128): ((128, 64, 8, 3), (128, 128, 8, 2)),
    ("pipelined-packed-turns-persistent", 128): ((128, 64, 8, 3), (128, 128, 8, 2)),
    ("packed", 128): ((64, 64, 4, 3),),
    **{(f"pipelined{way}", 128): ((128, 128, 8, 2),) for way in _WAYS},
    # fp8 / bf16: the groups multiply in turn, of which one waits for the other's softmax otherwise.
    ("pipelined-fp8", 128): ((128, 128, 8, 2), (128, 128, 8, 3)),
    ("pipelined-fp8-persistent", 128): ((128, 128, 8, 2), (128, 128, 8, 3)),
    ("pipelined-fp8-turns", 128): (),
    ("pipelined-fp8-turns-persistent", 128): (),
    # backward at 96 and 192 / at 128: in parts, and at 192 with dK and dV apart.
    **{
        (kernel, dim): ()
        for dim, kernels in ((192, ("dq", "dkdv", "dk", "dv")), (96, ("dq", "dkdv")))
        for kernel in kernels
    },
}


def missed() -> list[tuple[str, int, bool, list[Tile]]]:
    """(kernel, head dim, causal, tiles): all that is worth timing for the goals that were missed."""
    return [
        (kernel, dim, causal, [tile_of(shape) for shape in shapes or _SHAPES[kernel, dim]])
        for (kernel, dim), shapes in _MISSED.items()
        for causal in (False, True)
    ]


def tile_of(shape: Sequence[int]) -> Tile:
    """The tile that (block_m, block_n, warps, stages[, registers or 0[, in parts]]) says."""
    block_m, block_n, warps, stages, registers, in_parts = [*shape, 0, 0][:6]
    return Tile(block_m, block_n, warps, stages, registers or None, bool(in_parts))


def shape_of(tile: Tile) -> list[int]:
    """The other way round."""
    shape = [tile.block_m, tile.block_n, tile.num_warps, tile.num_stages]
    if tile.max_registers is None and not tile.in_parts:
        return shape
    return [*shape, tile.max_registers or 0, int(tile.in_parts)]


def all_candidates() -> dict[tuple[str, int], list[Tile]]:
    """Everything there is to time, by kernel and head dim."""
    return {key: candidates(*key) for key in _SHAPES}
