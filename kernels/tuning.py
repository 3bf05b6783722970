"""Tile sizes, warps and pipeline stages: one static table, nothing tuned at import.

Keyed by architecture, element size in bytes and padded head dim. ``interpreter`` has its own rule: a
tile step costs about the same whatever its size there, so long problems get large tiles.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from kernels.interpreter import interpreted


@dataclass(frozen=True, slots=True)
class Tile:
    """A launch configuration; ``block_m`` counts queries, ``block_n`` keys.

    ``max_registers`` caps registers a thread, so that more programs share a multiprocessor; None is no cap.
    ``in_parts``: the backward of kernels/hopper holds the head dim in two parts, where `parts` has two.
    """

    block_m: int
    block_n: int
    num_warps: int = 4
    num_stages: int = 2
    max_registers: int | None = None
    in_parts: bool = False

    def launch(self) -> dict[str, Any]:
        """The launch options of Triton that this stands for."""
        options = {"num_warps": self.num_warps, "num_stages": self.num_stages}
        return options if self.max_registers is None else {**options, "maxnreg": self.max_registers}

    def widths(self, head_dim: int) -> tuple[int, int]:
        """Columns of the two parts of a 16-bit head dim; the second may be 0."""
        return parts(head_dim, 2) if self.in_parts else (padded(head_dim), 0)


# The assembler that Triton 3.6 ships for sm90 (ptxas 12.8) miscompiles wgmma at head dims up to 32 with 4
# warps or more: reads of shared memory out of bounds, seen in the forward at 32 (compute-sanitizer; none with
# ptxas 13.0). Hence 2 warps (mma.sync) there. In backward kernels larger dims fail now and then with 4: 8.
#
# (architecture, element bytes) -> largest padded head dim -> tile. The entries of sm90 are shapes that the
# assembler fits into registers, with two programs or more on a multiprocessor where possible; fp32 runs
# without tensor cores (IEEE).
_FORWARD: dict[tuple[str, int], dict[int, Tile]] = {
    ("sm90", 2): {
        32: Tile(64, 64, 2, 2),
        64: Tile(128, 64, 4, 3),
        128: Tile(128, 64, 8, 2),
        256: Tile(128, 64, 8, 2),
    },
    ("sm90", 1): {
        32: Tile(64, 64, 2, 2),
        64: Tile(128, 128, 8, 2),
        128: Tile(128, 128, 8, 2),
        256: Tile(128, 64, 8, 2),
    },
    ("sm90", 4): {
        32: Tile(64, 32, 8, 1),
        64: Tile(64, 32, 8, 1),
        128: Tile(32, 32, 8, 1),
        256: Tile(32, 16, 8, 1),
    },
}
# The same for calls with a mask or a bias tensor, whose tiles take registers and shared memory too. Keys per
# tile are as above, so that what is declared of a call does not depend on its options.
_FORWARD_WITH_DATA_MASK: dict[tuple[str, int], dict[int, Tile]] = {
    ("sm90", 2): {
        32: Tile(64, 64, 2, 2),
        64: Tile(128, 64, 8, 2),
        128: Tile(128, 64, 8, 1),
        256: Tile(64, 64, 8, 1),
    },
    ("sm90", 1): {
        32: Tile(64, 64, 2, 2),
        64: Tile(128, 128, 8, 1),
        128: Tile(128, 128, 8, 1),
        256: Tile(64, 64, 8, 1),
    },
}
# (architecture, element bytes, kernel) -> largest padded head dim -> tile.
_BACKWARD: dict[tuple[str, int, str], dict[int, Tile]] = {
    ("sm90", 2, "dkdv"): {
        32: Tile(64, 64, 2, 2),
        64: Tile(32, 128, 8, 2),
        128: Tile(32, 128, 8, 1),
        256: Tile(32, 32, 8, 1),
    },
    ("sm90", 2, "dq"): {
        32: Tile(64, 64, 2, 2),
        64: Tile(128, 64, 8, 2),
        128: Tile(128, 64, 8, 2),
        256: Tile(64, 32, 8, 1),
    },
    ("sm90", 4, "dkdv"): {
        32: Tile(32, 32, 4, 1),
        64: Tile(32, 32, 8, 1),
        128: Tile(16, 32, 4, 1),
        256: Tile(16, 16, 4, 1),
    },
    ("sm90", 4, "dq"): {
        32: Tile(32, 32, 4, 1),
        64: Tile(32, 32, 8, 1),
        128: Tile(32, 16, 8, 1),
        256: Tile(16, 16, 4, 1),
    },
}
# For score paths whose backward reads q and k twice, rounded and as they were given.
_BACKWARD_TWO_COPIES: dict[tuple[str, int, str], dict[int, Tile]] = {
    ("sm90", 2, "dkdv"): {
        32: Tile(64, 64, 2, 2),
        64: Tile(32, 64, 8, 2),
        128: Tile(32, 64, 8, 1),
        256: Tile(32, 32, 8, 1),
    },
    ("sm90", 2, "dq"): {
        32: Tile(64, 64, 2, 2),
        64: Tile(64, 64, 8, 2),
        128: Tile(64, 64, 8, 1),
        256: Tile(64, 32, 8, 1),
    },
}
# The portable forward of calls, packed or not, that the kernels of kernels/hopper would take with 128 keys a
# tile, if their tensors lay right: as many here, so that what is declared does not depend on addresses.
_FORWARD_SIMPLE: dict[tuple[str, int], dict[int, Tile]] = {
    ("sm90", 2): {64: Tile(64, 128, 4, 2), 128: Tile(128, 128, 8, 2)}
}
# The forward of kernels/hopper, 16-bit: padded head dim -> (keys from which on it is used, tile), most keys
# first. By keys alone, so that it can be declared: whether a window hides anything is known only at a call.
# The fastest of `kernels.bench.sweep` on an H200 at 1k, 4k and 16k keys. 256 is not yet swept.
_HOPPER_FORWARD: dict[int, tuple[tuple[int, Tile], ...]] = {
    64: ((2048, Tile(64, 128, 4, 2)), (0, Tile(64, 64, 4, 2))),
    # From 1024 keys on most calls go to _HOPPER_PIPELINED, and the others must take as many keys a tile:
    # between 3 % faster and 4 % slower than (64, 64, 4, 3).
    128: ((1024, Tile(128, 128, 8, 3)), (0, Tile(64, 64, 4, 3))),
    # Timed at 192, where it is as fast as the portable one; what is long goes to _HOPPER_PIPELINED.
    256: ((0, Tile(128, 64, 8, 2)),),
}


@dataclass(frozen=True, slots=True)
class Pipelined:
    """When and how kernels/hopper/pipelined.py takes a call with no window and a positive scale.

    Numbers of keys are those of a segment on average where segments are packed.

    Args:
        fewest_keys: shorter calls stay with the kernel in Triton.
        persistent: programs take several tiles in turn where there is no mask.
        persistent_masked_below: and under a causal mask with fewer keys than this.
        turns: the two groups of warps start their products in turn.
    """

    tile: Tile
    fewest_keys: int
    persistent: bool
    persistent_masked_below: int
    turns: bool = False


# (element bytes, sum of `parts`) -> when and how kernels/hopper/pipelined.py takes it, most keys first. As
# many keys a tile as in _HOPPER_FORWARD, and so one of _FORWARD_SIMPLE. The fastest of `kernels.bench.sweep`
# on an H200 at 1k, 4k and 16k keys, in 16 bit faster than the kernel in Triton at each. Under a mask fp8
# programs that take several tiles are 7 % faster at 4k and 6 % slower at 16k. 192 by
# `kernels.bench.alternate`, 1.4 to 1.7 times as fast as Triton's; 96 like 128. Not timed below 1024 keys.
# 64 in calls that took turns: two groups of warps are slower than Triton's kernel from 4k on; three are 10 %
# faster at 4k and 14 % at 16k, under a mask 2 % and 9 % (that with a program a tile, 5 % less with several);
# four with half the keys, which _HOPPER_FORWARD has below 2048, 9 % at 1k, and 2 % under a mask.
_HOPPER_PIPELINED: dict[tuple[int, int], tuple[Pipelined, ...]] = {
    (2, 64): (
        Pipelined(Tile(192, 128, 12, 3), 2048, True, 8192),
        Pipelined(Tile(256, 64, 16, 4), 1024, True, 2048),
    ),
    (2, 96): (Pipelined(Tile(128, 128, 8, 2), 1024, True, 4096),),
    (2, 128): (Pipelined(Tile(128, 128, 8, 2), 1024, True, 4096),),
    (2, 192): (Pipelined(Tile(128, 64, 8, 3), 1024, True, 4096),),
    (1, 128): (Pipelined(Tile(128, 128, 8, 2), 1024, True, 8192),),
}
# The same of packed segments, by the sum of `parts`. Swept at 128, segments of 1k, 4k and 16k keys: from 4k
# on 9 to 29 % faster than Triton's (64, 64, 4, 3), and at 1k 6 % slower under a mask. Programs that take
# several tiles under a mask meet the long ones again and again where tiles and multiprocessors divide each
# other, and then take 1.6 times as long: none do. 96 like 128.
_HOPPER_PIPELINED_PACKED: dict[int, tuple[Pipelined, ...]] = {
    96: (Pipelined(Tile(128, 128, 8, 2), 2048, True, 0, turns=True),),
    128: (Pipelined(Tile(128, 128, 8, 2), 2048, True, 0, turns=True),),
}
# The forward in Triton of packed segments: padded head dim -> (keys of a segment on average from which on it
# is used, tile), most first. Of long segments it has what the kernel above does not take, with as many keys a
# tile. Not yet swept but for (64, 64, 4, 3).
_HOPPER_PACKED: dict[int, tuple[tuple[int, Tile], ...]] = {
    64: ((0, Tile(64, 64, 4, 2)),),
    128: ((2048, Tile(128, 128, 8, 2)), (0, Tile(64, 64, 4, 3))),
    256: ((0, Tile(128, 64, 8, 2)),),
}
# The same of fp8 products: as many keys as the portable forward's. Not yet swept.
_HOPPER_FP8: dict[int, Tile] = {
    64: Tile(128, 128, 8, 2),
    128: Tile(128, 128, 8, 2),
    256: Tile(128, 64, 8, 2),
}
# The backward of kernels/hopper, 16-bit: (kernel, padded head dim or sum of `parts`) -> tile of calls that
# see all keys, and of calls with a band (causal, window). The fastest of `kernels.bench.sweep` on an H200
# (geometric mean over 1k, 4k and 16k), judged and repeated; 8 warps where those cost under 5 %. 256 is not
# yet swept.
_HOPPER: dict[tuple[str, int], tuple[Tile, Tile]] = {
    ("dkdv", 64): (Tile(64, 64, 4, 2), Tile(32, 64, 4, 3)),
    ("dkdv", 128): (Tile(64, 64, 4, 2), Tile(64, 64, 4, 2)),
    ("dkdv", 256): (Tile(32, 64, 8, 2), Tile(32, 64, 8, 2)),
    ("dq", 64): (Tile(128, 64, 8, 4), Tile(128, 64, 8, 3)),
    ("dq", 128): (Tile(128, 64, 8, 3), Tile(128, 64, 8, 3)),
    ("dq", 256): (Tile(64, 64, 8, 2), Tile(64, 64, 8, 2)),
    ("dkdv", 96): (Tile(64, 64, 4, 2, in_parts=True), Tile(64, 64, 4, 3, in_parts=True)),
    ("dq", 96): (Tile(64, 64, 4, 3, in_parts=True), Tile(64, 64, 4, 3, in_parts=True)),
    ("dkdv", 192): (Tile(32, 64, 4, 2, in_parts=True), Tile(32, 64, 4, 2, in_parts=True)),
    ("dk", 192): (Tile(64, 128, 8, 2, in_parts=True), Tile(64, 128, 8, 2, in_parts=True)),
    ("dv", 192): (Tile(64, 128, 8, 2, in_parts=True), Tile(64, 128, 8, 2, in_parts=True)),
    ("dq", 192): (Tile(128, 32, 8, 3, in_parts=True), Tile(128, 32, 8, 3, in_parts=True)),
}
# (sum of `parts`, whether there is a band) at which dK and dV are computed in a launch each, with tiles for
# "dk" and "dv" above: under a band that takes 0.88 times as long at 192, without one 1.29 times.
_APART: frozenset[tuple[int, bool]] = frozenset({(192, True)})
HOPPER_HEAD_DIMS = tuple(_HOPPER_FORWARD)  # padded
# Head dims, padded or by the sum of `parts`, whose tiles were timed, by what runs.
_SWEPT_HEAD_DIMS = {"forward": (64, 128, 256), "packed": (64, 128), "backward": (64, 128, 192)}
_LEAST_SPLIT = 128  # padded head dim
# Other GPUs: what fits 100 KiB of shared memory.
_SMALL_SHARED_MEMORY: dict[int, dict[int, Tile]] = {
    1: {64: Tile(64, 64, 4, 2), 128: Tile(64, 64, 4, 2), 256: Tile(64, 32, 4, 1)},
    2: {64: Tile(64, 64, 4, 2), 128: Tile(64, 32, 4, 2), 256: Tile(32, 32, 4, 1)},
    4: {64: Tile(32, 32, 4, 1), 128: Tile(32, 16, 4, 1), 256: Tile(16, 16, 4, 1)},
}


def padded(dim: int, smallest: int = 16) -> int:
    """Power of two that holds ``dim``, 16 at least: what tl.arange and the matrix units accept."""
    return max(smallest, 1 << max(dim - 1, 0).bit_length())


def parts(head_dim: int, element_bytes: int) -> tuple[int, int]:
    """How kernels/hopper may hold a head dim: padded, or (16 bit) one and a half of a power of two.

    The second part is 0 where there is none.
    """
    whole = padded(head_dim)
    if element_bytes != 2 or whole < _LEAST_SPLIT or head_dim > whole // 4 * 3:
        return whole, 0
    return whole // 2, whole // 4


@cache
def architecture(device_type: str) -> str:
    """``interpreter``, or ``sm90`` and the like for the current CUDA device."""
    if device_type != "cuda" or interpreted():
        return "interpreter"
    major, minor = torch.cuda.get_device_capability()
    return f"sm{major}{minor}"


def forward_tile(
    device_type: str,
    element_bytes: int,
    head_dim: int,
    value_dim: int,
    num_queries: int,
    num_keys: int,
    data_mask: bool = False,
    simple: bool = False,
    packed: int | None = None,
) -> Tile:
    """The forward's tile for a problem; the same call answers what a kernel declares about itself.

    Sizes are those of what enters the products: ``element_bytes`` is 1 for fp8, whose products take 32 keys
    at least. ``simple``: no more options than the kernels of kernels/hopper take (`kernels.hopper.calls`);
    ``packed``: none but those and packed segments, of so many keys on average (`mean_length`).
    """
    fp8 = element_bytes == 1
    arch = architecture(device_type)
    if arch == "interpreter":
        return Tile(_interpreter_side(num_queries), max(_interpreter_side(num_keys), 32 if fp8 else 16))
    key = (arch, element_bytes)
    by_dim = _FORWARD.get(key, _SMALL_SHARED_MEMORY[element_bytes])
    kind = "forward" if packed is None else "packed"
    if (simple or packed is not None) and hopper_has(element_bytes, head_dim, value_dim, kind):
        keys = hopper_forward_tile(head_dim, num_keys, packed).block_n
        alike = {dim: tile for dim, tile in _FORWARD_SIMPLE.get(key, {}).items() if tile.block_n == keys}
        by_dim = {**by_dim, **alike}
    if data_mask:
        by_dim = _FORWARD_WITH_DATA_MASK.get(key, by_dim)
    if key in (("sm90", 2), ("sm90", 1)) and min(padded(head_dim), padded(value_dim)) <= 32:
        return _entry(by_dim, 1, 1)  # one small dim is enough for the assembler's fault
    return _entry(by_dim, head_dim, value_dim)


def backward_tile(
    kernel: str,
    device_type: str,
    element_bytes: int,
    head_dim: int,
    value_dim: int,
    num_queries: int,
    num_keys: int,
    two_copies: bool = False,
) -> Tile:
    """The tile of backward kernel ``"dq"``, ``"dkdv"`` or ``"dbias"`` (which takes dq's).

    ``element_bytes`` are those of what enters the gradient's products; ``two_copies``: q and k are read
    rounded and as they were given.
    """
    arch = architecture(device_type)
    if arch == "interpreter":
        return Tile(_interpreter_side(num_queries), _interpreter_side(num_keys))
    kernel = "dq" if kernel == "dbias" else kernel
    key = (arch, element_bytes, kernel)
    by_dim = _BACKWARD.get(key, _SMALL_SHARED_MEMORY[element_bytes])
    if two_copies:
        by_dim = _BACKWARD_TWO_COPIES.get(key, by_dim)
    return by_dim[
        next(limit for limit in sorted(by_dim) if max(padded(head_dim), padded(value_dim)) <= limit)
    ]


def hopper_has(element_bytes: int, head_dim: int, value_dim: int, kind: str = "forward") -> bool:
    """Whether kernels/hopper has swept tiles for these; rows are whole units of 16 bytes.

    Args:
        kind: ``"forward"``, ``"packed"`` (forward of packed segments) or ``"backward"``.
    """
    swept = {padded(head_dim), sum(parts(head_dim, 2))} & set(_SWEPT_HEAD_DIMS[kind])
    return element_bytes == 2 and head_dim == value_dim and head_dim % 8 == 0 and bool(swept)


def hopper_tile(
    kernel: str,
    device_type: str,
    head_dim: int,
    banded: bool,
    num_queries: int,
    num_keys: int,
    packed: int | None = None,
) -> Tile:
    """The tile of a kernel of kernels/hopper: ``"forward"``, ``"fp8"`` (forward), ``"dq"``, ``"dkdv"``, ...

    ``packed``: keys of a packed segment on average, on which the tile then depends alone; None: not packed.
    """
    if architecture(device_type) == "interpreter":
        fewest = 32 if kernel == "fp8" else 16
        return Tile(_interpreter_side(num_queries), max(_interpreter_side(num_keys), fewest))
    if kernel == "fp8":
        return _HOPPER_FP8[padded(head_dim)]
    if kernel == "forward":
        return hopper_forward_tile(head_dim, num_keys, packed)
    exact, whole = (kernel, sum(parts(head_dim, 2))), (kernel, padded(head_dim))
    return _HOPPER[exact if exact in _HOPPER else whole][banded]


def computed_apart(device_type: str, head_dim: int, banded: bool) -> bool:
    """Whether kernels/hopper computes dK and dV in a launch each."""
    return architecture(device_type) != "interpreter" and (sum(parts(head_dim, 2)), banded) in _APART


def mean_length(total: int, segments: int) -> int:
    """Rows of a packed segment on average, which the host knows though it knows no segment's length."""
    return total // max(segments, 1)


def hopper_forward_tile(head_dim: int, num_keys: int, packed: int | None) -> Tile:
    """The tile of the forward in Triton on Hopper; ``packed``: as in `hopper_tile`."""
    table, keys = (_HOPPER_FORWARD, num_keys) if packed is None else (_HOPPER_PACKED, packed)
    return next(tile for fewest, tile in table[padded(head_dim)] if keys >= fewest)


def pipelined_tile(
    element_bytes: int, head_dim: int, num_keys: int, banded: bool, packed: int | None = None
) -> tuple[Tile, bool, bool] | None:
    """The tile of kernels/hopper/pipelined.py, whether persistent, whether in turns; None: not for it.

    ``packed``: as in `hopper_tile`.
    """
    held = sum(parts(head_dim, element_bytes))
    if packed is None:
        keys, entries = num_keys, _HOPPER_PIPELINED.get((element_bytes, held), ())
    else:
        keys, entries = packed, _HOPPER_PIPELINED_PACKED.get(held, ())
    entry = next((x for x in entries if keys >= x.fewest_keys), None)
    if entry is None:
        return None
    persistent = keys < entry.persistent_masked_below if banded else entry.persistent
    return entry.tile, persistent, entry.turns


def decode_tile(
    device_type: str, element_bytes: int, head_dim: int, value_dim: int, rows: int, num_keys: int
) -> Tile:
    """The tile of the decode kernel; ``rows`` are queries times heads of a group.

    Few rows leave the matrix unit half empty; the time goes into reading the cache.
    """
    if architecture(device_type) == "interpreter":
        return Tile(
            min(_interpreter_side(rows), 64), 64 if num_keys > 64 else max(_interpreter_side(num_keys), 32)
        )
    wider = max(padded(head_dim), padded(value_dim))
    keys = 64 if wider * element_bytes <= 256 else 32
    return Tile(
        16 if rows <= 16 else 32, keys, 2 if wider <= 32 else 4, 2 if wider * element_bytes <= 256 else 1
    )


def _entry(by_dim: dict[int, Tile], head_dim: int, value_dim: int) -> Tile:
    wider = max(padded(head_dim), padded(value_dim))
    return by_dim[min(limit for limit in by_dim if wider <= limit)]


def _interpreter_side(length: int) -> int:
    """16 to 128, such that anything past 16 takes several tiles only when it is long."""
    if length <= 64:
        return max(16, 1 << max(length - 1, 1).bit_length())
    return 64 if length <= 256 else 128


def forward_tables() -> tuple[dict[tuple[str, int], dict[int, Tile]], ...]:
    """The forward's tables, without and with a mask or bias, for tests that run every entry."""
    return _FORWARD, _FORWARD_WITH_DATA_MASK, _FORWARD_SIMPLE


def hopper_tables() -> dict[str, list[tuple[int, Tile]]]:
    """Entries (head dim, tile) of kernels/hopper by kernel, for tests that run every one."""
    banded: dict[str, list[tuple[int, Tile]]] = {"dq": [], "dkdv": [], "dk": [], "dv": []}
    for (kernel, dim), tiles in _HOPPER.items():
        banded[kernel] += [(dim, tile) for tile in dict.fromkeys(tiles)]
    pipelined: dict[int, list[tuple[int, Tile]]] = {1: [], 2: []}
    for (element_bytes, dim), entries in _HOPPER_PIPELINED.items():
        pipelined[element_bytes] += [(dim, entry.tile) for entry in entries]
    return {
        "forward": [(dim, tile) for dim, tiles in _HOPPER_FORWARD.items() for _, tile in tiles],
        "pipelined": pipelined[2],
        "pipelined fp8": pipelined[1],
        "pipelined packed": [(dim, x.tile) for dim, found in _HOPPER_PIPELINED_PACKED.items() for x in found],
        "packed forward": [(dim, tile) for dim, tiles in _HOPPER_PACKED.items() for _, tile in tiles],
        "fp8": list(_HOPPER_FP8.items()),
        **banded,
        **{f"packed {kernel}": entries for kernel, entries in banded.items()},
    }


def backward_tables(two_copies: bool = False) -> dict[tuple[str, int, str], dict[int, Tile]]:
    """The backward's table, or that of score paths that read q and k twice."""
    return _BACKWARD_TWO_COPIES if two_copies else _BACKWARD
