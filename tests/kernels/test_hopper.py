"""The Hopper kernels against the portable ones (equal bits where tiles are equal) and against float64."""

import itertools
import math

import pytest
import torch

import kernels
from kernels import passes
from kernels.backward_dkdv import launch_dkdv
from kernels.backward_dq import launch_dq
from kernels.forward_kernel import launch_forward
from kernels.hopper import calls
from kernels.hopper.backward_dkdv import launch_hopper_dk, launch_hopper_dkdv, launch_hopper_dv
from kernels.hopper.backward_dq import launch_hopper_dq
from kernels.hopper.forward import launch_hopper_forward
from kernels.hopper.pipelined import pipelined_possible
from kernels.interpreter import interpreted
from kernels.operands import Gradients, Operands
from kernels.options import parse_options
from kernels.score_path import plain_path
from kernels.tuning import Tile
from tests.kernels.attention import assert_close, assert_gradients_close, gradients, inputs, make

NAN = math.nan
DTYPES = [torch.float16, torch.bfloat16]
MASKS = [
    {},
    {"causal": "top_left"},
    {"causal": "bottom_right"},
    {"window": (20, 30)},
    {"causal": "bottom_right", "window": (7, None)},
    {"window": (None, 3), "scale": -0.3},
]
CASES = [
    ((1, 1), {}),
    ((1, 70), MASKS[2]),
    ((70, 1), MASKS[1]),
    ((64, 128), MASKS[2]),
    ((65, 127), MASKS[0]),
    ((150, 90), MASKS[2]),
    ((90, 70), MASKS[3]),
    ((70, 90), MASKS[4]),
    ((40, 70), MASKS[5]),
]


@pytest.fixture(autouse=True)
def repaired():
    kernels.interpreter.repair()


def forward(q, k, v, **options):
    parsed = parse_options(q, k, **options)
    assert calls.possible(q, k, v, parsed)
    return launch_hopper_forward(q, k, v, parsed)


def backward(dout, q, k, v, lse, delta, **options):
    parsed = parse_options(q, k, **options)
    assert calls.possible(q, k, v, parsed, dout)
    dk, dv = launch_hopper_dkdv(dout, q, k, v, lse, delta, parsed)
    return {"dq": launch_hopper_dq(dout, q, k, v, lse, delta, parsed), "dk": dk, "dv": dv}


def rows(out, dout):
    return (out.float() * dout.float()).sum(-1)


@pytest.mark.parametrize(("lengths", "options"), CASES, ids=str)
def test_lengths_and_masks(lengths, options, device):
    q, k, v = inputs(device, torch.bfloat16, heads=1, nq=lengths[0], nk=lengths[1], d=64)
    out, lse = forward(q, k, v, **options)
    assert_close(out, lse, q, k, v, **options)
    dout = make(out.shape, out.dtype, 100, device)
    got = backward(dout, q, k, v, lse, rows(out, dout), **options)
    assert_gradients_close(got, gradients(q, k, v, dout, **options), q.dtype)


@pytest.mark.parametrize(
    ("d", "dtype", "options"),
    [(64, dtype, options) for dtype in DTYPES for options in MASKS[1:4]]
    + [
        (128, DTYPES[1], MASKS[0]),
        (256, DTYPES[0], MASKS[2]),
        (40, DTYPES[1], MASKS[1]),
        (96, DTYPES[0], {}),
    ],
    ids=str,
)
def test_bits_of_the_portable_kernels(d, dtype, options, device):
    """Same tiles, same arithmetic; grouped heads, a batch, and tails on both sides."""
    tile = Tile(32, 32, 2 if d < 256 else 4, 1)
    q, k, v = inputs(device, dtype, batch=2, heads=2, kv_heads=1, nq=45, nk=50, d=d)
    parsed = parse_options(q, k, **options)
    operands, path = Operands(q, k, v), plain_path(dtype)
    out, lse = launch_forward(operands, parsed, path, tile)
    got = launch_hopper_forward(q, k, v, parsed, tile)
    assert torch.equal(got[0], out)
    assert torch.equal(got[1], lse)
    dout = make(out.shape, dtype, 100, device)
    tensors = (dout, q, k, v, lse, rows(out, dout), parsed, tile)
    portable = (Gradients(q, k, v, dout, lse, rows(out, dout)), operands, parsed, path, tile)
    assert torch.equal(launch_hopper_dq(*tensors), launch_dq(*portable))
    for one, other in zip(launch_hopper_dkdv(*tensors), launch_dkdv(*portable), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(("d", "lengths"), [(96, None), (192, None), (72, [30, 0, 15]), (136, [1, 20, 24])])
def test_head_dims_in_two_parts(d, lengths, device):
    """The gradients, packed too; dK and dV by themselves have the bits of the launch that makes both.

    Not the bits of one part: the interpreter, unlike the matrix unit, sums two in another order.
    """
    tile = Tile(32, 32, 4, 1, in_parts=True)
    assert tile.widths(d)[1] > 0
    nq = nk = 45 if lengths else 70
    q, k, v = inputs(device, torch.float16, heads=2, kv_heads=1, nq=nq, nk=nk, d=d)
    options = {"causal": "bottom_right", "window": (40, None)}
    if lengths:
        ends = torch.tensor([0, *itertools.accumulate(lengths)], device=device)
        options |= {"cu_seqlens_q": ends, "cu_seqlens_k": ends}
    out, lse = forward(q, k, v, **options)
    dout = make(out.shape, out.dtype, 100, device)
    delta = rows(out, dout)
    given = (dout, q, k, v, lse, delta, parse_options(q, k, **options), tile)
    dk, dv = launch_hopper_dkdv(*given)
    got = {"dq": launch_hopper_dq(*given), "dk": dk, "dv": dv}
    assert_gradients_close(got, gradients(q, k, v, dout, **options), q.dtype)
    assert torch.equal(launch_hopper_dk(*given), dk)
    assert torch.equal(launch_hopper_dv(*given), dv)


@pytest.mark.parametrize("section", [2, 3, 100])
def test_the_order_of_work_changes_nothing(section, device):
    """Sections that divide the heads, that do not, and one for all: every tile is done once."""
    q, k, v = inputs(device, torch.bfloat16, batch=1, heads=4, nq=40, nk=40, d=64)
    parsed = parse_options(q, k, causal="top_left")
    out, lse = launch_hopper_forward(q, k, v, parsed, Tile(32, 32, 4, 1))
    got = launch_hopper_forward(q, k, v, parsed, Tile(32, 32, 4, 1), section)
    assert all(torch.equal(a, b) for a, b in zip(got, (out, lse), strict=True))
    tensors = (out, q, k, v, lse, rows(out, out), parsed, Tile(32, 32, 4, 1))
    assert torch.equal(launch_hopper_dq(*tensors, section), launch_hopper_dq(*tensors))
    for one, other in zip(launch_hopper_dkdv(*tensors, section), launch_hopper_dkdv(*tensors), strict=True):
        assert torch.equal(one, other)


def test_surroundings_may_hold_nan(device):
    """Aligned views into NaN buffers, rows stored beside other heads' included."""

    def poisoned(x):
        batch, heads, length, dim = x.shape
        shape = (batch + 2, length + 40, heads + 2, dim + 32)
        buffer = torch.full(shape, NAN, dtype=x.dtype, device=x.device)
        view = buffer[1:-1, 20:-20, 1:-1, 16:-16].transpose(1, 2)
        view.copy_(x)
        return view

    q, k, v = inputs(device, torch.bfloat16, nq=37, nk=45, d=64)
    out, lse = forward(q, k, v, causal="bottom_right")
    dirty = [poisoned(x) for x in (q, k, v)]
    got = forward(*dirty, causal="bottom_right")
    assert torch.equal(got[0], out)
    assert torch.equal(got[1], lse)
    dout = make(out.shape, out.dtype, 3, device)
    clean = backward(dout, q, k, v, lse, rows(out, dout), causal="bottom_right")
    got = backward(poisoned(dout), *dirty, lse, rows(out, dout), causal="bottom_right")
    assert all(torch.equal(clean[name], got[name]) for name in clean)


def test_nan_reaches_the_rows_that_see_it(device):
    q, k, v = inputs(device, torch.bfloat16, heads=2, nq=70, nk=70, d=64)
    out, lse = forward(q, k, v, causal="top_left")
    other = torch.arange(70, device=device) != 30
    dirty = q.clone()
    dirty[0, 0, 30, 3] = NAN
    got, got_lse = forward(dirty, k, v, causal="top_left")
    assert bool(got[0, 0, 30].isnan().all() & got_lse[0, 0, 30].isnan())
    assert torch.equal(got[:, :, other], out[:, :, other])
    assert torch.equal(got[:, 1], out[:, 1])
    dirty = k.clone()
    dirty[0, 0, 41, 5] = NAN
    got, got_lse = forward(q, dirty, v, causal="top_left")
    assert torch.equal(got[:, :, :41], out[:, :, :41])
    assert bool(got[0, 0, 41:].isnan().all() & got_lse[0, 0, 41:].isnan().all())
    dout = make(out.shape, out.dtype, 5, device)
    clean = backward(dout, q, k, v, lse, rows(out, dout), causal="top_left")
    dout[0, 0, 30] = NAN
    got = backward(dout, q, k, v, lse, rows(out, dout), causal="top_left")
    assert torch.equal(got["dq"][:, :, other], clean["dq"][:, :, other])
    assert torch.equal(got["dk"][0, 0, 31:], clean["dk"][0, 0, 31:])
    assert torch.equal(got["dk"][0, 1], clean["dk"][0, 1])


def test_calls_that_go_to_the_portable_kernels(device):
    q, k, v = inputs(device, torch.bfloat16, nq=20, nk=20, d=64)

    def possible(q=q, k=k, v=v, **options):
        return calls.possible(q, k, v, parse_options(q, k, **options))

    assert possible()
    assert possible(causal="top_left", window=(3, None), scale=-2.0)
    assert not possible(softcap=3.0)
    assert not possible(scale=0.0)
    assert not possible(sink=torch.zeros(2, device=device))
    assert not possible(alibi_slopes=torch.ones(2, device=device))
    assert not possible(key_lengths=torch.tensor([3], device=device))
    assert not possible(mask=torch.ones(1, 1, 20, 20, dtype=torch.bool, device=device))
    ends = torch.tensor([0, 20], device=device)
    assert possible(q[:1], k[:1], v[:1], cu_seqlens_q=ends, cu_seqlens_k=ends)
    assert not possible(q[:1], k[:1], v[:1], cu_seqlens_q=ends, cu_seqlens_k=ends, softcap=3.0)
    assert not possible(k=k[:, :1].expand_as(k), v=v)  # a stride of 0
    assert not possible(v=v[..., :32])
    wide = make((1, 2, 20, 65), torch.bfloat16, 0, device)
    assert not possible(q=wide[..., 1:])  # base and rows off 16 bytes
    odd = make((1, 2, 20, 66), torch.bfloat16, 0, device)
    assert not possible(q=odd, k=odd, v=odd)  # rows that are not whole units of 16 bytes
    assert not possible(q=q.float(), k=k.float(), v=v.float())
    assert not possible(k=k[:, :, :0], v=v[:, :, :0])


@pytest.mark.parametrize(
    "options",
    [
        *MASKS,
        {"scale": 0.0},
        {"scale": 1e-38},
        {"scale": -1e-30},
        {"softcap": 3.0},
        {"sink": torch.zeros(2)},
        {"alibi_slopes": torch.ones(2)},
        {"key_lengths": torch.tensor([3])},
        {"mask": torch.ones(1, 1, 20, 20, dtype=torch.bool)},
        {"bias": torch.zeros(1, 1, 20, 20)},
        {"cu_seqlens_q": torch.tensor([0, 20]), "cu_seqlens_k": torch.tensor([0, 20])},
        {"cu_seqlens_q": torch.tensor([0, 20]), "cu_seqlens_k": torch.tensor([0, 20]), "softcap": 1.0},
        {"cu_seqlens_q": torch.tensor([0, 20]), "cu_seqlens_k": torch.tensor([0, 20]), "causal": "top_left"},
    ],
    ids=lambda options: " ".join(options) or "none",
)
def test_the_declaration_knows_what_a_call_asks_for(options, device):
    options = {n: x.to(device) if torch.is_tensor(x) else x for n, x in options.items()}
    q, k, _ = inputs(device, torch.bfloat16, nq=20, nk=20, d=64)
    parsed = parse_options(q, k, **options)
    assert calls.simple_by_name(options) == calls.simple(parsed)
    assert calls.packed_by_name(options) == calls.packed(parsed)


@pytest.mark.parametrize(
    ("options", "possible"),
    [
        ({}, True),
        ({"causal": "bottom_right"}, True),
        ({"window": (None, 3)}, True),
        ({"window": (3, None)}, False),
        ({"scale": -0.5}, False),
        ({"cu_seqlens_q": torch.tensor([0, 20]), "cu_seqlens_k": torch.tensor([0, 20])}, True),
    ],
    ids=str,
)
def test_what_the_kernel_in_gluon_covers(options, possible, device):
    options = {n: x.to(device) if torch.is_tensor(x) else x for n, x in options.items()}
    q, k, _ = inputs(device, torch.bfloat16, nq=20, nk=20, d=64)
    assert pipelined_possible(parse_options(q, k, **options)) is possible


def test_the_passes_take_these_kernels(device, monkeypatch):
    """Forced, as on Hopper: both passes agree with the portable ones to rounding, an LSE with any strides."""
    q, k, v = inputs(device, torch.bfloat16, heads=2, kv_heads=1, nq=40, nk=50, d=96)
    launched = []
    for name in ("forward", "dq", "dkdv"):
        launch = getattr(passes, f"launch_hopper_{name}")
        monkeypatch.setattr(
            passes, f"launch_hopper_{name}", lambda *a, n=name, run=launch: launched.append(n) or run(*a)
        )
    out, lse = kernels.forward(q, k, v, causal="top_left")
    dout = make(out.shape, out.dtype, 100, device)
    portable = kernels.backward(dout, q, k, v, out, lse, causal="top_left")
    if interpreted():
        assert launched == []
        monkeypatch.setattr(passes, "takes", calls.possible)
    launched.clear()
    got = kernels.forward(q, k, v, causal="top_left")
    assert all(torch.equal(a, b) for a, b in zip(got, (out, lse), strict=True))
    strided = lse.transpose(1, 2).contiguous().transpose(1, 2)
    hopper = kernels.backward(dout, q, k, v, out, strided, causal="top_left")
    assert launched == ["forward", "dq", "dkdv"]
    assert all(torch.equal(hopper[name], portable[name]) for name in portable)


@pytest.mark.skipif(not interpreted(), reason="what a GPU without Hopper's engine does")
def test_other_devices_are_not_taken(device):
    q, k, v = inputs(device, torch.bfloat16, d=64)
    assert not calls.takes(q, k, v, parse_options(q, k))
