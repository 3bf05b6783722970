"""Packed segments in the Hopper kernels: bits of the portable ones, and neighbours that hold NaN."""

import gc
import itertools
import math

import pytest
import torch

import kernels
from kernels import options as options_module
from kernels.backward_dkdv import launch_dkdv
from kernels.backward_dq import launch_dq
from kernels.forward_kernel import launch_forward
from kernels.hopper import calls
from kernels.hopper.backward_dkdv import launch_hopper_dkdv
from kernels.hopper.backward_dq import launch_hopper_dq
from kernels.hopper.forward import launch_hopper_forward
from kernels.hopper.packed import slots
from kernels.operands import Gradients, Operands
from kernels.options import parse_options, read_anew
from kernels.score_path import plain_path
from kernels.tuning import Tile
from tests.kernels.attention import inputs, make

LENGTHS = [
    ([37, 0, 1, 70, 16], [50, 3, 0, 64, 40]),
    ([64, 32, 33], [32, 31, 1]),
    ([5], [70]),
    ([1] * 70, [2] * 70),  # more than one chunk of the search
]
MASKS = [
    {},
    {"causal": "top_left"},
    {"causal": "bottom_right", "window": (20, None)},
    {"window": (3, 40), "scale": -0.3},
]
TILE = Tile(32, 32, 4, 1)


@pytest.fixture(autouse=True)
def repaired():
    kernels.interpreter.repair()


def ends(lengths, device):
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=device)


def packed_inputs(lengths, device, d=64, dtype=torch.bfloat16):
    sizes = {"nq": sum(lengths[0]), "nk": sum(lengths[1])}
    q, k, v = inputs(device, dtype, batch=1, heads=2, kv_heads=1, d=d, **sizes)
    packing = dict(zip(("cu_seqlens_q", "cu_seqlens_k"), (ends(x, device) for x in lengths), strict=True))
    return q, k, v, make(q.shape, dtype, 100, device), packing


def hopper(dout, q, k, v, lse, delta, parsed):
    assert calls.possible(q, k, v, parsed, dout)
    out = launch_hopper_forward(q, k, v, parsed, TILE)
    given = (dout, q, k, v, lse if lse is not None else out[1], delta, parsed, TILE)
    return [*out, launch_hopper_dq(*given), *launch_hopper_dkdv(*given)]


@pytest.mark.parametrize(
    ("lengths", "options", "d"),
    [*((LENGTHS[0], mask, 64) for mask in MASKS), *((x, MASKS[1], 40) for x in LENGTHS[1:])],
    ids=str,
)
def test_bits_of_the_portable_kernels(lengths, options, d, device):
    q, k, v, dout, packing = packed_inputs(lengths, device, d)
    parsed = parse_options(q, k, **options, **packing)
    operands, path = Operands(q, k, v), plain_path(q.dtype)
    out, lse = launch_forward(operands, parsed, path, TILE)
    delta = (out.float() * dout.float()).sum(-1)
    portable = (Gradients(q, k, v, dout, lse, delta), operands, parsed, path, TILE)
    expected = [out, lse, launch_dq(*portable), *launch_dkdv(*portable)]
    for one, other in zip(hopper(dout, q, k, v, lse, delta, parsed), expected, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("options", MASKS, ids=str)
@pytest.mark.parametrize("side", ["q", "k", "v", "dout"])
def test_nan_stays_in_its_segment(side, options, device):
    """All of one segment is NaN: its neighbours, whose last tiles reach into it, keep every bit."""
    lengths = ([37, 20, 41], [45, 20, 30])
    q, k, v, dout, packing = packed_inputs(lengths, device)
    parsed = parse_options(q, k, **options, **packing)
    _, lse = launch_hopper_forward(q, k, v, parsed, TILE)
    delta = torch.zeros_like(lse)
    clean = hopper(dout, q, k, v, lse, delta, parsed)
    tensors = {"q": q, "k": k, "v": v, "dout": dout}
    mine = slice(37, 57) if side in ("q", "dout") else slice(45, 65)
    tensors[side][:, :, mine] = math.nan
    dirty = hopper(tensors["dout"], tensors["q"], tensors["k"], tensors["v"], lse, delta, parsed)
    touched = 0
    for one, other, rows in zip(clean, dirty, [slice(37, 57)] * 3 + [slice(45, 65)] * 2, strict=True):
        keep = torch.ones(one.shape[2], dtype=torch.bool)
        keep[rows] = False
        assert torch.equal(one[:, :, keep], other[:, :, keep])
        touched += int(other[:, :, rows].isnan().any())
    assert touched > 0


@pytest.mark.parametrize("block", [1, 16, 64])
def test_every_tile_has_a_slot(block):
    """Exhaustively over small segments: slots of a segment hold its tiles and end before the next one's."""
    for lengths in itertools.product([0, 1, block - 1, block, block + 1, 2 * block], repeat=3):
        starts = [0, *itertools.accumulate(lengths)]
        firsts = [start // block + s for s, start in enumerate(starts[:-1])]
        firsts.append(slots(starts[-1], len(lengths), block))
        for length, (first, following) in zip(lengths, itertools.pairwise(firsts), strict=True):
            assert following - first >= -(-length // block)


def test_stale_ends_stay_inside_the_tensors(device):
    """Ends changed without torch knowing, to whatever: rows outside are neither read nor written."""
    q, k, v, dout, packing = packed_inputs(([20, 20], [20, 20]), device)
    parsed = parse_options(q, k, causal="top_left", **packing)
    for x in packing.values():
        x.copy_(torch.tensor([-7, 30, 1000]))
    out, lse, *_ = hopper(dout, q, k, v, None, torch.zeros_like(q[..., 0].float()), parsed)
    expected = torch.nn.functional.scaled_dot_product_attention(
        q[:, :, 30:].double(), k[:, :, 30:].double(), v[:, :, 30:].double(), is_causal=True, enable_gqa=True
    )
    assert float((out[:, :, 30:] - expected).abs().max()) < 0.05
    assert bool(lse[:, :, 30:].isfinite().all())


def test_ends_on_a_gpu_are_read_once_a_version(device, monkeypatch):
    """What stalls the stream is done once; torch's own writes are seen."""
    x = torch.tensor([0, 3, 5])
    monkeypatch.setattr(options_module, "_on_host", lambda _: False)
    reads = []
    tolist = torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda self: reads.append(1) or tolist(self))
    assert options_module._values(x) == options_module._values(x) == [0, 3, 5]
    assert len(reads) == 1
    x[1] = 4
    assert options_module._values(x) == [0, 4, 5]
    assert len(reads) == 2
    q, k, *_ = packed_inputs(([3, 2], [3, 2]), device)
    ends_q = torch.tensor([0, 3, 5], device=device)
    parsed = parse_options(q, k, cu_seqlens_q=ends_q, cu_seqlens_k=ends_q)
    ends_q.data[1] = 4  # no new version
    assert parse_options(q, k, cu_seqlens_q=ends_q, cu_seqlens_k=ends_q).longest_q == 3
    assert read_anew(parsed).longest_q == 4


def test_heads_side_by_side_as_in_a_batch():
    """What the cache holds are the segments under way, not all that are packed."""
    k = torch.empty(1, 16, 4 * 4096, 128, dtype=torch.bfloat16, device="meta")
    assert calls.section_heads(k, 4096, 1, 64) == calls.section_heads(k[:, :, :4096], 4096, 1, 64) == 16
    assert calls.section_heads(k, 16384, 1, 64) == 4
    assert calls.section_heads(k, 0, 1, 64) == 64


def test_packed_calls_are_parsed_once_a_version(device, monkeypatch):
    """Alike in all that torch knows: what launches remember is shared; and nothing outlives the ends."""
    monkeypatch.setattr(options_module, "_on_host", lambda _: False)
    q, k, *_ = packed_inputs(([3, 2], [4, 1]), device)

    def parsed(ends_q, ends_k, **options):
        return parse_options(q, k, cu_seqlens_q=ends_q, cu_seqlens_k=ends_k, **options)

    before = len(options_module._parsed_packed)
    one, other = ends([3, 2], device), ends([4, 1], device)
    first = parsed(one, other)
    again = parsed(one, other)
    assert again == first
    assert again.launches is first.launches
    assert again.cu_q is one
    assert again.cu_k is other
    twin = ends([3, 2], device)
    for different in (
        parsed(one, other, causal="top_left"),
        parsed(one, other, scale=0.5),
        parsed(twin, other),
        parsed(one, ends([4, 1], device)),
        parsed(one.long(), other.long()),
    ):
        assert different.launches is not first.launches
    one[1] = 5
    assert parsed(one, other).longest_q == 5
    one[1] = 6
    with pytest.raises(ValueError, match="cu_seqlens_q"):
        parsed(one, other)
    del one, first, again, different, twin
    gc.collect()
    assert len(options_module._parsed_packed) == before
