"""Every option, forward and backward together, against the definition in float64."""

import math
from dataclasses import replace

import pytest
import torch

import kernels
from kernels.options import parse_options
from tests.kernels.attention import assert_close, assert_gradients_close, gradients, inputs, make

INF, NAN = math.inf, math.nan


def check(q, k, v, **options):
    """Output, log-sum-exp and every gradient; returns the gradients."""
    out, lse = kernels.forward(q, k, v, **options)
    assert_close(out, lse, q, k, v, **options)
    dout, dlse = make(out.shape, out.dtype, 100, q.device), make(lse.shape, torch.float32, 101, q.device)
    got = kernels.backward(dout, q, k, v, out, lse, dlse=dlse, **options)
    assert_gradients_close(got, gradients(q, k, v, dout, dlse, **options), q.dtype)
    return got


WINDOWS = [(0, 0), (1, None), (None, 2), (15, 16), (70, 1), (3, 0), (2**31, 2**31)]


@pytest.mark.parametrize("causal", [None, "top_left", "bottom_right"])
@pytest.mark.parametrize("window", WINDOWS, ids=str)
def test_window(window, causal, device):
    check(*inputs(device, heads=1, nq=70, nk=90), window=window, causal=causal)


@pytest.mark.parametrize("lengths", [(150, 20), (20, 150), (130, 129)], ids=str)
def test_window_that_empties_whole_tiles_of_a_row(lengths, device):
    check(*inputs(device, heads=1, nq=lengths[0], nk=lengths[1]), window=(5, 0))
    check(*inputs(device, heads=1, nq=lengths[0], nk=lengths[1]), window=(3, 3), causal="top_left")


@pytest.mark.parametrize("shape", [(2, 2, 70, 90), (1, 2, 1, 90), (2, 1, 70, 1), (1, 1, 1, 1)], ids=str)
def test_mask(shape, device):
    mask = make(shape, torch.float32, 7, device) > 0
    if shape[2] > 1:
        mask[:, :, 3] = False
        mask[:, :, 40:, : shape[3] * 2 // 3] = False
    check(*inputs(device, batch=2, nq=70, nk=90), mask=mask, causal="bottom_right")


def test_mask_that_is_a_view(device):
    mask = (make((1, 1, 180, 70), torch.float32, 7, device) > 0)[:, :, ::2].transpose(2, 3)
    check(*inputs(device, nq=70, nk=90), mask=mask)


BIASES = [(2, 2, 70, 90), (1, 2, 70, 90), (1, 1, 70, 90), (1, 2, 1, 90), (2, 1, 70, 1), (1, 1, 1, 1)]


@pytest.mark.parametrize("shape", BIASES, ids=str)
def test_bias_and_its_gradient(shape, device):
    bias = make(shape, torch.float32, 8, device)
    got = check(*inputs(device, batch=2, nq=70, nk=90), bias=bias, causal="bottom_right", scale=1.0)
    assert got["dbias"].shape == shape


def test_bias_with_grouped_heads_in_16_bits(device):
    bias = make((1, 4, 33, 47), torch.bfloat16, 8, device)
    got = check(*inputs(device, torch.bfloat16, batch=2, heads=4, kv_heads=2), bias=bias)
    assert got["dbias"].dtype == torch.bfloat16


def test_bias_of_minus_infinity_is_a_mask(device):
    bias = make((1, 2, 70, 90), torch.float32, 8, device)
    bias[:, :, 5] = -INF
    bias[..., 80:] = -INF
    check(*inputs(device, nq=70, nk=90), bias=bias)


def test_alibi(device):
    q, k, v = inputs(device, batch=2, nq=70, nk=90)
    check(q, k, v, alibi_slopes=torch.tensor([0.5, 0.0625], device=device), causal="bottom_right")
    check(q, k, v, alibi_slopes=torch.tensor([[0.5, 0.1], [-0.2, 1.0]], device=device))


@pytest.mark.parametrize("softcap", [0.5, 2.0, 50.0, 1e6])
def test_softcap(softcap, device):
    check(*inputs(device, nq=70, nk=90), softcap=softcap, scale=1.0, causal="top_left")


def test_softcap_is_applied_before_mask_and_bias(device):
    bias = make((1, 1, 70, 90), torch.float32, 8, device) * 3
    check(*inputs(device, nq=70, nk=90), softcap=1.0, scale=-1.0, bias=bias, window=(7, 7))


@pytest.mark.parametrize("size", [0.0, 3.0, -200.0, 200.0])
def test_sink_and_its_gradient(size, device):
    sink = torch.tensor([size, -0.5], device=device)
    q, k, v = inputs(device, batch=2, nq=90, nk=70)
    check(q, k, v, sink=sink, causal="bottom_right")
    _, lse = kernels.forward(q, k, v, sink=sink, causal="bottom_right")
    assert torch.equal(lse[:, :, 0], sink.expand(2, 2))
    check(q, k, v, sink=sink, window=(4, 0))


def test_sink_of_minus_infinity_adds_nothing(device):
    q, k, v = inputs(device, heads=2, nq=40, nk=20)
    sink = torch.tensor([-INF, -INF], device=device)
    plain = kernels.forward(q, k, v, causal="bottom_right")
    sunk = kernels.forward(q, k, v, causal="bottom_right", sink=sink)
    assert all(torch.equal(a, b) for a, b in zip(plain, sunk, strict=True))
    got = kernels.backward(plain[0], q, k, v, *sunk, causal="bottom_right", sink=sink)
    assert bool((got["dsink"] == 0).all())


@pytest.mark.parametrize("causal", [None, "top_left", "bottom_right"])
def test_key_lengths(causal, device):
    q, k, v = inputs(device, batch=4, heads=1, nq=70, nk=90)
    check(q, k, v, key_lengths=torch.tensor([0, 90, 33, 64], device=device), causal=causal)


def test_padding_may_hold_nan(device):
    q, k, v = inputs(device, batch=2, heads=1, nq=70, nk=90)
    lengths = torch.tensor([20, 70], device=device, dtype=torch.int32)
    out, lse = kernels.forward(q, k, v, key_lengths=lengths)
    clean = kernels.backward(out, q, k, v, out, lse, key_lengths=lengths)
    for b, length in enumerate(lengths.tolist()):
        k[b, :, length:] = NAN
        v[b, :, length:] = NAN
    again, lse_again = kernels.forward(q, k, v, key_lengths=lengths)
    dirty = kernels.backward(out, q, k, v, out, lse, key_lengths=lengths)
    assert torch.equal(out, again)
    assert torch.equal(lse, lse_again)
    assert all(torch.equal(clean[name], dirty[name]) for name in clean)


PACKED = [([0, 20, 20, 50, 70], [0, 10, 40, 40, 90]), ([0, 70], [0, 90]), ([0, 1, 2, 70], [0, 64, 65, 90])]


@pytest.mark.parametrize("causal", [None, "top_left", "bottom_right"])
@pytest.mark.parametrize("ends", PACKED, ids=str)
def test_packed_segments(ends, causal, device):
    cu_q, cu_k = (torch.tensor(x, device=device, dtype=torch.int32) for x in ends)
    q, k, v = inputs(device, heads=4, kv_heads=2, nq=70, nk=90)
    check(q, k, v, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, causal=causal)


@pytest.mark.parametrize("shape", [(1, 2, 70, 90), (1, 2, 1, 90), (1, 1, 70, 1), (1, 1, 1, 1)], ids=str)
def test_all_options_at_once(shape, device):
    cu_q, cu_k = (torch.tensor(x, device=device) for x in PACKED[0])
    check(
        *inputs(device, nq=70, nk=90),
        scale=-0.7,
        causal="bottom_right",
        window=(25, None),
        mask=make((1, 2, 70, 90), torch.float32, 7, device) > -1,
        bias=make(shape, torch.float32, 8, device),
        alibi_slopes=torch.tensor([0.5, 0.1], device=device),
        softcap=3.0,
        sink=torch.tensor([0.5, -1.0], device=device),
        key_lengths=torch.tensor([75], device=device),
        cu_seqlens_q=cu_q,
        cu_seqlens_k=cu_k,
    )


SHORT = [([0, 5, 5, 17], [0, 1, 1, 2]), ([0, 1, 2, 2], [0, 9, 9, 17]), ([0, 1, 2, 3], [0, 1, 1, 2])]


@pytest.mark.parametrize("broadcast", [(True, True), (True, False), (False, True), (False, False)], ids=str)
@pytest.mark.parametrize("ends", SHORT, ids=str)
def test_gradient_of_a_bias_on_segments_of_one_query_or_key(ends, broadcast, device):
    """A dimension of 1 is broadcast even where no segment is longer: its gradient has one place."""
    cu_q, cu_k = (torch.tensor(x, device=device, dtype=torch.int32) for x in ends)
    nq, nk = ends[0][-1], ends[1][-1]
    shape = (1, 1, 1 if broadcast[0] else nq, 1 if broadcast[1] else nk)
    q, k, v = inputs(device, heads=2, nq=nq, nk=nk)
    bias = make(shape, torch.float32, 8, device)
    got = check(q, k, v, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, bias=bias)
    assert got["dbias"].shape == shape


def test_options_in_16_bits(device):
    for dtype in (torch.float16, torch.bfloat16):
        check(
            *inputs(device, dtype, batch=2, heads=4, kv_heads=2, d=32),
            causal="top_left",
            window=(20, None),
            softcap=5.0,
            sink=torch.tensor([0.5, -1.0, 0.0, 2.0], device=device),
            alibi_slopes=torch.tensor([0.5, 0.1, 0.2, 0.3], device=device),
            key_lengths=torch.tensor([40, 47], device=device),
        )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"window": (-1, 0)}, "window left is -1"),
        ({"mask": torch.zeros(1, 1, 33, 47)}, "mask.dtype is torch.float32"),
        ({"mask": torch.zeros(33, 47, dtype=torch.bool)}, r"mask.shape is \(33, 47\)"),
        ({"bias": torch.zeros(1, 1, 33, 46)}, "bias.shape is"),
        ({"bias": torch.zeros(1, 1, 33, 47, dtype=torch.int32)}, "bias.dtype is torch.int32"),
        ({"alibi_slopes": torch.zeros(3)}, "alibi_slopes.shape is"),
        ({"softcap": 0.0}, "softcap is 0.0"),
        ({"sink": torch.zeros(3)}, "sink.shape is"),
        ({"key_lengths": torch.zeros(1)}, "key_lengths is torch.float32"),
        ({"cu_seqlens_q": torch.tensor([0, 33])}, "only one of cu_seqlens_q and cu_seqlens_k"),
        ({"cu_seqlens_q": torch.tensor([0, 32]), "cu_seqlens_k": torch.tensor([0, 47])}, "cu_seqlens_q is"),
    ],
    ids=lambda x: str(x) if isinstance(x, str) else "",
)
def test_illegal_values_are_named(options, message, device):
    options = {n: x.to(device) if torch.is_tensor(x) else x for n, x in options.items()}
    with pytest.raises(ValueError, match=message):
        kernels.forward(*inputs(device), **options)


@pytest.mark.parametrize("value", [None, 1.0])
def test_unknown_options_are_refused(value, device):
    with pytest.raises(TypeError, match="softcup"):
        kernels.forward(*inputs(device), softcup=value)


def test_calls_that_are_alike_are_parsed_once(device):
    q, k, _ = inputs(device)
    first = parse_options(q, k, causal="top_left", window=(5, None))
    assert parse_options(q * 2, k * 2, causal="top_left", window=(5, None), mask=None) is first
    others = [
        parse_options(q, k, causal="bottom_right", window=(5, None)),
        parse_options(q, k, causal="top_left", window=(6, None)),
        parse_options(q, k, causal="top_left", window=(5, None), scale=2.0),
        parse_options(q[..., :8], k[..., :8], causal="top_left", window=(5, None)),
        parse_options(q, k[:, :, :3], causal="top_left", window=(5, None)),
    ]
    assert all(other is not first and other != first for other in others)
    assert others[3].scale != first.scale
    first.launches["one"] = None
    assert replace(first, bottom_right=True).launches == {}, "launches of other options"
    assert parse_options(q, k, softcap=2.0).softcap
    assert not parse_options(q, k).softcap
    for _ in range(2):
        with pytest.raises(ValueError, match="scale is nan"):
            parse_options(q, k, scale=NAN)
        with pytest.raises(ValueError, match="causal is 'both'"):
            parse_options(q, k, causal="both")
    # Equal as numbers, but their signs differ.
    signs = [math.copysign(1.0, parse_options(q, k, scale=zero).scale) for zero in (0.0, -0.0, 0.0)]
    assert signs == [1.0, -1.0, 1.0]
