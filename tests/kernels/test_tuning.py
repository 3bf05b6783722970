"""The table of tiles: complete, within what a kernel declares, and clear of what is known to miscompile."""

import itertools

import pytest

from kernels import tuning

DIMS = [1, 16, 17, 32, 33, 64, 96, 128, 192, 256]


@pytest.mark.parametrize("arch", ["sm90", "sm80", "interpreter"])
@pytest.mark.parametrize("element_bytes", [2, 4])
def test_every_head_dim_has_a_tile(arch, element_bytes, monkeypatch):
    monkeypatch.setattr(tuning, "architecture", lambda _: arch)
    for d, dv in itertools.product(DIMS, DIMS):
        sizes = ("cuda", element_bytes, d, dv, 1000, 1000)
        tiles = [tuning.forward_tile(*sizes, data_mask=m) for m in (False, True)]
        # What is declared of a call must not depend on options that the declaration is not told.
        assert tiles[0].block_n == tiles[1].block_n
        tiles += [tuning.backward_tile(kernel, *sizes) for kernel in ("dq", "dkdv", "dbias")]
        for tile in tiles:
            assert tile.block_m >= 16
            assert tile.block_n >= 16


@pytest.mark.parametrize("keys", [0, 1000, 1023, 1024, 2047, 2048, 4096, 5000, 100_000])
@pytest.mark.parametrize("d", [d for d in range(1, 257) if tuning.hopper_has(2, d, d)])
def test_hopper_and_portable_tiles_hold_the_same_keys(d, keys, monkeypatch):
    """Which of them runs depends on addresses and strides, of which a declaration knows nothing."""
    monkeypatch.setattr(tuning, "architecture", lambda _: "sm90")
    portable = tuning.forward_tile("cuda", 2, d, d, 1000, keys, simple=True)
    for banded in (False, True):
        assert tuning.hopper_tile("forward", "cuda", d, banded, 1000, keys).block_n == portable.block_n
        pipelined = tuning.pipelined_tile(2, d, keys, banded)
        assert pipelined is None or pipelined[0].block_n == portable.block_n
    for banded in (False, True):
        assert tuning.hopper_tile("forward", "cuda", d, banded, 1000, 9 * keys, packed=keys).block_n == (
            tuning.forward_tile("cuda", 2, d, d, 1000, 9 * keys, packed=keys).block_n
        )


@pytest.mark.parametrize("d", [d for d in range(1, 257) if tuning.padded(d) in tuning.HOPPER_HEAD_DIMS])
def test_hopper_and_portable_fp8_tiles_hold_the_same_keys(d, monkeypatch):
    monkeypatch.setattr(tuning, "architecture", lambda _: "sm90")
    hopper = tuning.hopper_tile("fp8", "cuda", d, False, 1000, 1000)
    portable = tuning.forward_tile("cuda", 1, d, d, 1000, 1000)
    pipelined = tuning.pipelined_tile(1, d, 1000, False)
    assert hopper.block_n == portable.block_n
    assert pipelined is None or pipelined[0].block_n == portable.block_n


@pytest.mark.parametrize("mean", [0, 1, 1000, 2047, 2048, 4096, 100_000])
@pytest.mark.parametrize("d", [d for d in range(1, 257) if tuning.hopper_has(2, d, d, "packed")])
def test_packed_tiles_hold_the_same_keys(d, mean, monkeypatch):
    """Whichever kernel takes a packed call, the checker is told one number, of what the host knows alone."""
    monkeypatch.setattr(tuning, "architecture", lambda _: "sm90")
    told = {tuning.forward_tile("cuda", 2, d, d, n, n, packed=mean).block_n for n in (mean, 9 * mean)}
    for banded, total in itertools.product((False, True), (mean, 9 * mean)):
        told.add(tuning.hopper_tile("forward", "cuda", d, banded, total, total, packed=mean).block_n)
        pipelined = tuning.pipelined_tile(2, d, total, banded, packed=mean)
        told |= set() if pipelined is None else {pipelined[0].block_n}
    assert len(told) == 1


@pytest.mark.parametrize("keys", [64, 128])
def test_a_packed_entry_rules_the_portable_kernel(keys, monkeypatch):
    monkeypatch.setattr(tuning, "architecture", lambda _: "sm90")
    monkeypatch.setitem(tuning._HOPPER_PACKED, 128, ((0, tuning.Tile(128, keys, 8, 2)),))
    assert tuning.forward_tile("cuda", 2, 128, 128, 1000, 1000, packed=1000).block_n == keys
    assert tuning.forward_tile("cuda", 2, 128, 128, 1000, 1000).block_n == 64


@pytest.mark.parametrize(
    ("dim", "entry"), [(dim, x) for dim, found in tuning._HOPPER_PIPELINED_PACKED.items() for x in found]
)
def test_long_segments_go_to_the_pipelined_kernel(dim, entry):
    """However many short ones there are: the mean decides, not the sum."""
    total, below = 1 << 20, entry.fewest_keys - 1
    assert tuning.pipelined_tile(2, dim, total, False, packed=below) is None
    found = tuning.pipelined_tile(2, dim, total, False, packed=entry.fewest_keys)
    assert found == (entry.tile, entry.persistent, entry.turns)


@pytest.mark.parametrize(("total", "segments", "mean"), [(100, 3, 33), (0, 2, 0), (5, 0, 5), (7, 8, 0)])
def test_mean_length(total, segments, mean):
    assert tuning.mean_length(total, segments) == mean


def test_what_runs_apart_has_tiles_of_its_own(monkeypatch):
    """dK and dV in a launch each are declared with the queries of their own tiles."""
    monkeypatch.setattr(tuning, "architecture", lambda _: "sm90")
    for dim, banded in tuning._APART:
        assert tuning.computed_apart("cuda", dim, banded)
        for kernel in ("dk", "dv"):
            assert (
                tuning.hopper_tile(kernel, "cuda", dim, banded, 100, 100)
                is tuning._HOPPER[kernel, dim][banded]
            )


@pytest.mark.parametrize("d", [d for d in range(1, 257) if tuning.hopper_has(2, d, d, "backward")])
def test_backward_tiles_hold_the_head_dim(d, monkeypatch):
    """Both parts of a tile hold all of it, and those of few registers keep off the assembler's fault."""
    monkeypatch.setattr(tuning, "architecture", lambda _: "sm90")
    for banded in (False, True):
        kernels = ("dq", "dk", "dv") if tuning.computed_apart("cuda", d, banded) else ("dq", "dkdv")
        for kernel in kernels:
            tile = tuning.hopper_tile(kernel, "cuda", d, banded, 1000, 1000)
            assert sum(tile.widths(d)) >= d
            assert tile.in_parts == (sum(tuning.parts(d, 2)) in (96, 192))


def test_small_head_dims_keep_off_wgmma(monkeypatch):
    """On Hopper those kernels fault with 4 warps or more under the assembler that Triton 3.6 ships."""
    monkeypatch.setattr(tuning, "architecture", lambda _: "sm90")
    for small, other, data_mask in itertools.product([1, 16, 32], [1, 32, 64, 256], (False, True)):
        for dims in ((small, other), (other, small)):
            assert tuning.forward_tile("cuda", 2, *dims, 1000, 1000, data_mask=data_mask).num_warps <= 2
    for d, dv, kernel in itertools.product([1, 16, 32], [1, 16, 32], ("dq", "dkdv", "dbias")):
        assert tuning.backward_tile(kernel, "cuda", 2, d, dv, 1000, 1000).num_warps <= 2


@pytest.mark.parametrize(
    ("length", "side"), [(0, 16), (1, 16), (16, 16), (17, 32), (64, 64), (65, 64), (300, 128)]
)
def test_interpreter_tiles_grow_with_the_length(length, side):
    assert tuning._interpreter_side(length) == side


@pytest.mark.parametrize(("size", "dim"), list(tuning._HOPPER_PIPELINED))
def test_long_calls_go_to_the_pipelined_kernel(size, dim):
    """Each entry rules from its fewest keys on, up to those of the entry before, and none rules below all."""
    entries = tuning._HOPPER_PIPELINED[size, dim]
    for d in (dim - 24, dim):
        ends = [1 << 20, *(entry.fewest_keys for entry in entries)]
        assert ends == sorted(set(ends), reverse=True)
        assert tuning.pipelined_tile(size, d, ends[-1] - 1, False) is None
        for end, entry in zip(ends, entries, strict=False):
            for keys in (entry.fewest_keys, end - 1):
                expected = (entry.tile, entry.persistent, entry.turns)
                assert tuning.pipelined_tile(size, d, keys, False) == expected
                masked = keys < entry.persistent_masked_below
                assert tuning.pipelined_tile(size, d, keys, True) == (entry.tile, masked, entry.turns)
    assert tuning.pipelined_tile(size, 256, 1 << 20, False) is None
    assert tuning.pipelined_tile(4, dim, 1 << 20, False) is None


@pytest.mark.parametrize(("dim", "tile"), tuning.hopper_tables()["pipelined"])
def test_pipelined_tiles_are_whole_groups_of_warps(dim, tile):
    """Of 64 queries and four warps each; rings fit into shared memory beside queries (if many, output)."""
    groups = tile.block_m // 64
    assert groups in (2, 3, 4)
    assert (tile.block_m, tile.num_warps) == (64 * groups, 4 * groups)
    rows = tile.block_m * (2 if groups > 2 else 1) + 2 * tile.num_stages * tile.block_n
    assert 2 * dim * rows < (227 << 10) - 1024


@pytest.mark.parametrize(
    ("dim", "size", "widths"),
    [
        (64, 2, (64, 0)),
        (48, 2, (64, 0)),
        (72, 2, (64, 32)),
        (96, 2, (64, 32)),
        (104, 2, (128, 0)),
        (96, 1, (128, 0)),
        (136, 2, (128, 64)),
        (192, 2, (128, 64)),
        (200, 2, (256, 0)),
    ],
)
def test_parts_of_a_head_dim(dim, size, widths):
    assert tuning.parts(dim, size) == widths
    assert sum(widths) >= dim
