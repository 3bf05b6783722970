"""What the programs of the kernel in Gluon work on: its own arithmetic, run on the host, over whole launches.

The interpreter does not run that kernel; where its tiles lie and how far they reach is plain arithmetic.
"""

import itertools
import types
from dataclasses import dataclass

import pytest
import torch

from kernels.hopper import pipelined
from kernels.hopper.packed import slots

BLOCK_N, HEADS, GROUP = 64, 3, 64
SEGMENTS = [
    ([37, 0, 1, 300, 128, 16, 5], [50, 3, 0, 290, 128, 40, 70]),
    ([64, 400, 33, 20], [32, 600, 1, 30]),
    ([256, 256, 128], [256, 256, 128]),  # whole tiles: an empty slot each
    ([1] * 70, [2] * 70),  # more than one chunk of the search
    ([0, 0], [0, 5]),
]
BANDS = [None, ("top_left", 0), ("bottom_right", 0), ("top_left", 70), ("bottom_right", 300)]


@dataclass
class Pointer:
    """Into a tensor of integers; what lies outside may not be read."""

    data: torch.Tensor
    offset: torch.Tensor | int = 0

    def __add__(self, offset):
        return Pointer(self.data, self.offset + offset)


def load(pointer, mask=True, other=0):
    place = torch.as_tensor(pointer.offset)
    read = torch.broadcast_to(torch.as_tensor(mask), place.shape)
    assert bool(((place >= 0) & (place < len(pointer.data)))[read].all())
    return torch.where(read, pointer.data[place.clamp(0, len(pointer.data) - 1)], other)


def of_two(function):
    return lambda a, b: function(torch.as_tensor(a), torch.as_tensor(b))


HOST = types.SimpleNamespace(
    int32=torch.int32,
    BlockedLayout=lambda *_: None,
    arange=lambda start, stop, _layout: torch.arange(start, stop),
    load=load,
    sum=lambda x, axis: x.sum(axis),
    minimum=of_two(torch.minimum),
    maximum=of_two(torch.maximum),
    where=torch.where,
)


def on_host(name, **called):
    """A function of the kernel as Python runs it."""
    code = getattr(pipelined, name).fn.__code__
    return types.FunctionType(code, {"gl": HOST, **called})


REACH = on_host("_reach")
WORK = on_host("_work", _segment=on_host("_segment"), _bounds=on_host("_bounds"), _reach=REACH)


def works(lengths, packed, band, section, block_m):
    """Of each program: head, first row, tiles visited, full ones; its segment's first rows and lengths."""
    (n_queries, n_keys), segments = map(sum, lengths), len(lengths[0])
    n_tiles = slots(n_queries, segments, block_m) if packed else -(-n_queries // block_m)
    ends = [Pointer(torch.tensor([0, *itertools.accumulate(x)])) for x in lengths]
    diagonal, right = band or ("top_left", 0)
    sizes = (n_tiles * HEADS, n_tiles, HEADS, section, HEADS)
    constants = (block_m, BLOCK_N, band is not None, diagonal == "bottom_right", 128, 0, packed)
    for i in range(n_tiles * HEADS):
        given = (i, sizes, (n_queries, n_keys, right), (*ends, segments), constants, 4)
        _batch, *found = map(int, WORK(*given))
        yield found


def reach_of(rows, n_queries, n_keys, band):
    """The last key that each of some rows sees."""
    if band is None:
        return [n_keys - 1] * len(rows)
    shift = n_keys - n_queries if band[0] == "bottom_right" else 0
    return [min(n_keys - 1, row + shift + band[1]) for row in rows]


@pytest.mark.parametrize(("block_m", "section"), [(128, 1), (128, 2), (128, HEADS), (192, 2)])
@pytest.mark.parametrize("band", BANDS, ids=str)
@pytest.mark.parametrize(
    ("lengths", "packed"), [(x, True) for x in SEGMENTS] + [(([300], [500]), False)], ids=str
)
def test_every_row_once_and_every_key_that_it_sees(lengths, packed, band, section, block_m):
    """No tile of keys that nobody sees but the one that every program needs; none lacks a mask it needs."""
    rows = []
    for i_h, i_m, n_visited, n_full, q_start, k_start, n_queries, n_keys in works(
        lengths, packed, band, section, block_m
    ):
        mine = range(i_m, min(i_m + block_m, n_queries))
        rows += [(i_h, q_start + row) for row in mine]
        assert 0 <= n_full <= n_visited
        last = reach_of(mine, n_queries, n_keys, band)
        farthest = max(last, default=-1)
        assert n_visited == max(farthest // BLOCK_N + 1, 1)
        assert all(n_full * BLOCK_N <= max(x + 1, 0) for x in last)
        assert k_start + n_keys <= sum(lengths[1])
    assert sorted(rows) == list(itertools.product(range(HEADS), range(sum(lengths[0]))))


@pytest.mark.parametrize("block_m", [192, 256])
@pytest.mark.parametrize("band", BANDS, ids=str)
@pytest.mark.parametrize("lengths", [(300, 500), (500, 300), (64, 70), (65, 1), (256, 256)], ids=str)
def test_groups_visit_what_their_own_rows_see(lengths, band, block_m):
    """And no more than is loaded for all of them, down to one tile, without which no turn would begin."""
    diagonal, right = band or ("top_left", 0)
    constants = (block_m, BLOCK_N, band is not None, diagonal == "bottom_right")
    for _, i_m, loaded, _, *_ in works(([lengths[0]], [lengths[1]]), False, band, 1, block_m):
        for first in range(i_m, i_m + block_m, GROUP):
            n_visited, n_full = map(int, REACH(torch.tensor(first), *lengths, right, constants, GROUP, True))
            last = reach_of(range(first, min(first + GROUP, lengths[0])), *lengths, band)
            assert n_visited == max(max(last, default=-1) // BLOCK_N + 1, 1)
            assert all(n_full * BLOCK_N <= max(x + 1, 0) for x in last)
            assert 0 <= n_full <= n_visited <= loaded


def places(i_program, programs, work, spread):
    """What a program works on in its rounds."""
    launched = types.SimpleNamespace(
        program_id=lambda _: i_program,
        num_programs=lambda _: programs,
        where=lambda condition, a, b: a if condition else b,
    )
    spread_on_host = on_host("_spread", gl=launched)
    return [spread_on_host(x, i, work, spread) for i, x in enumerate(range(i_program, work, programs))]


@pytest.mark.parametrize("spread", [False, True])
@pytest.mark.parametrize(("work", "programs"), [(1, 1), (7, 7), (22, 11), (23, 11), (100, 132), (3072, 132)])
def test_every_work_is_done_once_in_whatever_place(work, programs, spread):
    done = [place for i in range(programs) for place in places(i, programs, work, spread)]
    assert sorted(done) == list(range(work))


def test_programs_change_places():
    """Where 22 tiles a head divide 132 programs, each has a head's first tile as often as the others."""
    tiles = 22
    counts = {sum(x % tiles == 0 for x in places(i, 132, 132 * tiles, True)) for i in range(132)}
    assert counts == {1}
