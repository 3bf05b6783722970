"""The backward pass against float64 autograd of the definition: shapes, edges, repeatability, autograd."""

import math

import pytest
import torch

import kernels
from tests.kernels.attention import assert_gradients_close, gradients, inputs, make

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
CAUSAL = [None, "top_left", "bottom_right"]
NAN = math.nan


def check(q, k, v, *, with_dlse=True, **options):
    out, lse = kernels.forward(q, k, v, **options)
    dout = make(out.shape, out.dtype, 100, q.device)
    dlse = make(lse.shape, torch.float32, 101, q.device) if with_dlse else None
    got = kernels.backward(dout, q, k, v, out, lse, dlse=dlse, **options)
    for name in ("q", "k", "v"):
        assert got[f"d{name}"].dtype == q.dtype
    assert_gradients_close(got, gradients(q, k, v, dout, dlse, **options), q.dtype)
    return got


@pytest.mark.parametrize("causal", CAUSAL)
@pytest.mark.parametrize("lengths", [(1, 1), (17, 1), (65, 64), (100, 150), (150, 60)], ids=str)
def test_lengths(lengths, causal, device):
    check(*inputs(device, heads=1, nq=lengths[0], nk=lengths[1]), causal=causal)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dims", [(1, 1), (5, 20), (64, 64), (128, 80), (256, 256)], ids=str)
def test_head_dims(dims, dtype, device):
    check(*inputs(device, dtype, heads=1, d=dims[0], dv=dims[1]), causal="bottom_right")


@pytest.mark.parametrize("heads", [(4, 2), (6, 1)], ids=str)
def test_gradients_of_grouped_heads_are_summed(heads, device):
    check(*inputs(device, batch=2, heads=heads[0], kv_heads=heads[1]), causal="top_left", with_dlse=False)


@pytest.mark.parametrize("lengths", [(5, 0), (0, 5), (80, 20), (200, 3)], ids=str)
def test_empty_rows_add_nothing(lengths, device):
    got = check(*inputs(device, nq=lengths[0], nk=lengths[1]), causal="bottom_right")
    assert all(bool(x.isfinite().all()) for x in got.values())
    seen_from = max(0, lengths[0] - lengths[1])
    assert bool((got["dq"][:, :, :seen_from] == 0).all())


@pytest.mark.parametrize("scale", [0.0, -1.5, 1e-42, 2.0])
def test_scale(scale, device):
    check(*inputs(device, nq=40, nk=70), scale=scale)


def test_strides(device):
    """Views of every tensor, dout the expanded scalar that sum().backward() makes."""
    q = make((2, 33, 4, 16), torch.float32, 0, device).transpose(1, 2)
    k = make((2, 2, 47, 32), torch.float32, 1, device)[..., ::2]
    v = make((1, 1, 47, 24), torch.float32, 2, device).expand(2, 2, 47, 24)
    out, lse = kernels.forward(q, k, v)
    dout = torch.ones((), device=device).expand(out.shape)
    out = out.transpose(1, 2).contiguous().transpose(1, 2)
    lse = torch.stack([lse, lse], -1)[..., 0]
    got = kernels.backward(dout, q, k, v, out, lse)
    assert_gradients_close(got, gradients(q, k, v, dout), torch.float32)


@pytest.mark.parametrize("causal", CAUSAL)
def test_surroundings_may_hold_nan(causal, device):
    """Views into larger NaN buffers, every input of the backward among them."""

    def poisoned(x):
        buffer = torch.full([n + 40 for n in x.shape], NAN, dtype=x.dtype, device=x.device)
        view = buffer[tuple(slice(20, -20) for _ in x.shape)]
        view.copy_(x)
        return view

    q, k, v = inputs(device, nq=37, nk=45, d=20, dv=12)
    out, lse = kernels.forward(q, k, v, causal=causal)
    dout, dlse = make(out.shape, out.dtype, 5, device), make(lse.shape, lse.dtype, 6, device)
    clean = kernels.backward(dout, q, k, v, out, lse, dlse=dlse, causal=causal)
    dirty = kernels.backward(
        *(poisoned(x) for x in (dout, q, k, v, out, lse)), dlse=poisoned(dlse), causal=causal
    )
    assert all(torch.equal(clean[name], dirty[name]) for name in clean)


def test_nan_in_dout_reaches_its_row_and_the_keys_it_sees(device):
    q, k, v = inputs(device, heads=1, nq=70, nk=70)
    out, lse = kernels.forward(q, k, v, causal="top_left")
    dout = make(out.shape, out.dtype, 5, device)
    clean = kernels.backward(dout, q, k, v, out, lse, causal="top_left")
    dout[0, 0, 30] = NAN
    got = kernels.backward(dout, q, k, v, out, lse, causal="top_left")
    other = torch.arange(70, device=device) != 30
    assert bool(got["dq"][0, 0, 30].isnan().all())
    assert torch.equal(got["dq"][:, :, other], clean["dq"][:, :, other])
    assert bool(got["dk"][0, 0, :31].isnan().all())
    # The score gradient of hidden pairs is masked after the product with dP, not before.
    assert torch.equal(got["dk"][0, 0, 31:], clean["dk"][0, 0, 31:])


def test_repeats_are_bitwise_equal(device):
    q, k, v = inputs(device, torch.bfloat16, heads=4, kv_heads=2, nq=70, nk=90)
    out, lse = kernels.forward(q, k, v, causal="bottom_right")
    first, second = (kernels.backward(out, q, k, v, out, lse, causal="bottom_right") for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dout": torch.zeros(1, 2, 33, 8)}, "dout is torch.float32"),
        ({"out": torch.zeros(1, 2, 33, 16, dtype=torch.float16)}, "out is torch.float16"),
        ({"lse": torch.zeros(1, 2, 32)}, "lse is torch.float32"),
        ({"dlse": torch.zeros(1, 2, 33, dtype=torch.float64)}, "dlse is torch.float64"),
    ],
    ids=lambda x: str(x) if isinstance(x, str) else "",
)
def test_illegal_values_are_named(change, message, device):
    q, k, v = inputs(device)
    out, lse = kernels.forward(q, k, v)
    call = {"dout": out, "out": out, "lse": lse, "dlse": None, **{n: x.to(device) for n, x in change.items()}}
    with pytest.raises(ValueError, match=message):
        kernels.backward(call["dout"], q, k, v, call["out"], call["lse"], dlse=call["dlse"])
