"""The forward pass against the definition in float64: shapes, masks, strides, edges, and the reach of NaN."""

import math

import pytest
import torch

import kernels
from tests.kernels.attention import assert_close, attention, inputs, make

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
CAUSAL = [None, "top_left", "bottom_right"]
NAN, INF = math.nan, math.inf


def check(q, k, v, **options):
    assert_close(*kernels.forward(q, k, v, **options), q, k, v, **options)


LENGTHS = [
    (1, 1),
    (1, 17),
    (15, 16),
    (17, 15),
    (63, 65),
    (65, 64),
    (64, 63),
    (127, 129),
    (129, 128),
    (128, 127),
]


@pytest.mark.parametrize("causal", CAUSAL)
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_lengths(lengths, causal, device):
    check(*inputs(device, heads=1, nq=lengths[0], nk=lengths[1]), causal=causal)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("d", [1, 5, 64, 80, 128, 256])
def test_head_dims(d, dtype, device):
    check(*inputs(device, dtype, heads=1, d=d), causal="bottom_right")


@pytest.mark.parametrize("dims", [(64, 5), (5, 64), (192, 128), (1, 256)], ids=str)
def test_value_dim_differs(dims, device):
    check(*inputs(device, torch.bfloat16, d=dims[0], dv=dims[1]), causal="top_left")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads", [(4, 2), (6, 1), (3, 3)], ids=str)
def test_grouped_heads(heads, dtype, device):
    check(*inputs(device, dtype, batch=2, heads=heads[0], kv_heads=heads[1], nq=20, nk=20), causal="top_left")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_several_key_tiles(dtype, device):
    q, k, v = inputs(device, dtype, heads=1, nq=100, nk=300)
    # Largest key last, so that every tile raises the running maximum.
    k = (k.float() * torch.linspace(0.1, 6, 300, device=device)[:, None]).to(dtype)
    check(q, k, v)


@pytest.mark.parametrize("causal", CAUSAL)
@pytest.mark.parametrize("lengths", [(5, 0), (80, 48), (200, 3), (3, 200)], ids=str)
def test_rows_without_keys(lengths, causal, device):
    check(*inputs(device, nq=lengths[0], nk=lengths[1]), causal=causal)


@pytest.mark.parametrize("shape", [(0, 2, 5, 7), (2, 2, 0, 7), (2, 2, 0, 0)], ids=str)
def test_empty_tensors(shape, device):
    batch, heads, nq, nk = shape
    q, k, v = (torch.empty(batch, heads, n, 16, device=device) for n in (nq, nk, nk))
    out, lse = kernels.forward(q, k, v)
    assert out.shape == (batch, heads, nq, 16)
    assert lse.shape == (batch, heads, nq)


@pytest.mark.parametrize("scale", [0.0, -1.0, 1e-3, -7.5, 1e-42, 4.0])
def test_scale(scale, device):
    check(*inputs(device, nq=40, nk=70), scale=scale, causal="bottom_right")


def test_strides(device):
    """(batch, length, heads, dim) storage, a dim stride of 2, a reversed copy's stride, an expanded batch."""
    q = make((2, 33, 4, 16), torch.float32, 0, device).transpose(1, 2)
    k = make((2, 2, 47, 32), torch.float32, 1, device)[..., ::2]
    v = make((1, 1, 47, 24), torch.float32, 2, device).expand(2, 2, 47, 24)
    check(q, k, v, causal="bottom_right")
    row = make((1, 1, 1, 16), torch.float32, 3, device)
    check(row.expand(1, 4, 33, 16), row.expand(1, 2, 47, 16), v[:1])


@pytest.mark.parametrize("causal", CAUSAL)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_surroundings_may_hold_nan(dtype, causal, device):
    """Views into larger NaN buffers: nothing outside the tensors may be used."""
    tensors = inputs(device, dtype, nq=37, nk=45, d=20, dv=12)
    poisoned = []
    for x in tensors:
        batch, heads, length, dim = x.shape
        buffer = torch.full((batch + 2, heads + 2, length + 40, dim + 40), NAN, dtype=dtype, device=device)
        view = buffer[1:-1, 1:-1, 20:-20, 20:-20]
        view.copy_(x)
        poisoned.append(view)
    clean, dirty = kernels.forward(*tensors, causal=causal), kernels.forward(*poisoned, causal=causal)
    assert all(torch.equal(a, b) for a, b in zip(clean, dirty, strict=True))


def test_nan_reaches_the_rows_that_see_it(device):
    q, k, v = inputs(device, heads=1, nq=70, nk=70)
    out, lse = kernels.forward(q, k, v, causal="top_left")
    dirty_q, dirty_k, dirty_v = q.clone(), k.clone(), v.clone()
    dirty_q[0, 0, 30, 3] = NAN
    got, got_lse = kernels.forward(dirty_q, k, v, causal="top_left")
    other = torch.arange(70, device=device) != 30
    assert bool(got[0, 0, 30].isnan().all() & got_lse[0, 0, 30].isnan())
    assert torch.equal(got[:, :, other], out[:, :, other])
    dirty_k[0, 0, 41, 5] = NAN
    got, got_lse = kernels.forward(q, dirty_k, v, causal="top_left")
    assert torch.equal(got[:, :, :41], out[:, :, :41])
    assert torch.equal(got_lse[:, :, :41], lse[:, :, :41])
    assert bool(got[:, :, 41:].isnan().all() & got_lse[:, :, 41:].isnan().all())
    dirty_v[0, 0, 2, 7] = NAN
    got, got_lse = kernels.forward(q, k, dirty_v)
    assert bool(got[..., 7].isnan().all())
    assert not bool(got_lse.isnan().any())


def test_all_scores_nan(device):
    q, k, v = inputs(device, heads=1, nq=20, nk=20)
    out, lse = kernels.forward(q, torch.full_like(k, NAN), v)
    assert bool(out.isnan().all() & lse.isnan().all())


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_infinite_scores_never_give_a_finite_wrong_row(sign, device):
    """q . k = inf for one key, or -inf for all: NaN, or the limit; not a row of zeros."""
    q, k, v = (x.abs() for x in inputs(device, heads=1, nq=20, nk=40))
    k[0, 0, 25] = sign * INF
    out, _ = kernels.forward(q, k, v)
    exact, _ = attention(q, k[:, :, torch.arange(40, device=device) != 25], v[:, :, torch.arange(40) != 25])
    limit = (out.cpu().double() - exact).abs().amax(-1) < 1e-5 if sign < 0 else False
    assert bool((out.isnan().all(-1).cpu() | limit).all())
    out, _ = kernels.forward(q, torch.full_like(k, sign * INF), v)
    assert bool(out.isnan().all())


@pytest.mark.parametrize("size", [1e19, -1e19, 3e18])
def test_scores_past_fp32(size, device):
    """Finite inputs whose scores, or scaled scores, overflow: never a finite wrong row."""
    q, k, v = inputs(device, heads=1, nq=20, nk=40)
    q, k = q.abs() * size, k.abs() * 1e19
    out, _ = kernels.forward(q, k, v, scale=100.0)
    exact, _ = attention(q, k, v, scale=100.0)
    right = (out.cpu().double() - exact).abs().amax(-1) < 1e-5
    assert bool((right | out.isnan().all(-1).cpu()).all())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [1e2, 1e4, 1e6])
def test_large_scores(size, dtype, device):
    """Integers and a power-of-two scale, so that scores are exact: ties and one winner are exact too."""
    q = torch.full((1, 1, 3, 16), 64.0, device=device).to(dtype)
    k = torch.full((1, 1, 40, 16), 64.0, device=device).to(dtype)
    k[0, 0, 7] = 32.0
    k[0, 0, 30:] = -64.0
    v = make((1, 1, 40, 16), dtype, 3, device)
    check(q, k, v, scale=size / 2**16)
    check(q, k, v, scale=-size / 2**16)


@pytest.mark.parametrize("scale", [1.0, 1 / 3, -1 / 3, 1e-3])
def test_fp16_rows_whose_maximum_rounds_by_more_than_fp16_can_hold(scale, device):
    """Logits past 2^27: the rounding error of their maximum, as a power of two, is past fp16's range."""
    q = torch.full((1, 1, 4, 64), 32768.0, device=device).half()
    k = torch.full((1, 1, 40, 64), 32768.0, device=device).half()
    k[:, :, ::3] = -32768.0
    v = make((1, 1, 40, 64), torch.float16, 3, device)
    check(q, k, v, scale=scale)


def test_repeats_are_bitwise_equal(device):
    q, k, v = inputs(device, torch.bfloat16, nq=70, nk=90)
    first = kernels.forward(q, k, v, causal="bottom_right")
    second = kernels.forward(q, k, v, causal="bottom_right")
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_surface(device):
    q, k, v = inputs(device)
    out = kernels.flash_attention(q, k, v)
    pair = kernels.flash_attention(q, k, v, return_lse=True)
    assert torch.equal(out, pair[0])
    declared = kernels.flash_attention.__flashcheck__
    assert declared["self_test"]() == []
    plain = declared["arithmetic"]("bf16", 64, 64, 100, 100, device.type, options={})
    assert plain["probability_format"] == "bf16"
    assert plain["block_keys"] >= 16


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"causal": "yes"}, "causal is 'yes'"),
        ({"scale": NAN}, "scale is nan"),
        ({"q": torch.zeros(1, 2, 3)}, "q has 3 dimensions"),
        ({"q": torch.zeros(1, 2, 3, 16, dtype=torch.float64)}, "q.dtype is torch.float64"),
        ({"k": torch.zeros(1, 2, 47, 8)}, r"k.shape\[3\] is 8"),
        ({"k": torch.zeros(1, 3, 47, 16), "v": torch.zeros(1, 3, 47, 16)}, "q has 2 heads and k 3"),
        ({"v": torch.zeros(1, 2, 46, 16)}, "v has"),
        ({"v": torch.zeros(1, 2, 47, 257)}, r"v.shape\[3\] is 257"),
        ({"v": torch.zeros(2, 2, 47, 16)}, r"v.shape\[0\] is 2"),
    ],
    ids=lambda x: str(x) if isinstance(x, str) else "",
)
def test_illegal_values_are_named(change, message, device):
    q, k, v = inputs(device)
    call = {
        "q": q,
        "k": k,
        "v": v,
        **{n: x.to(device) if torch.is_tensor(x) else x for n, x in change.items()},
    }
    with pytest.raises(ValueError, match=message):
        kernels.flash_attention(call.pop("q"), call.pop("k"), call.pop("v"), **call)
