"""fp8 products in the Hopper forward: bits of the portable kernel, and v turned to have keys contiguous."""

import math
from dataclasses import replace

import pytest
import torch

import kernels
from kernels import passes
from kernels.forward_kernel import launch_forward
from kernels.hopper.calls import columns_readable, fp8_possible
from kernels.hopper.forward import launch_hopper_products
from kernels.options import parse_options
from kernels.quantise import columns, prepare
from kernels.score_path import parse_score_path
from kernels.tuning import Tile
from tests.kernels.attention import inputs

E4M3, E5M2, BF16 = torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16
TILE = Tile(32, 32, 4, 1)


@pytest.fixture(autouse=True)
def repaired():
    kernels.interpreter.repair()


def prepared(q, k, v, path_options, **options):
    settings = {"score": None, "score_scales": None, "score_rows": None, "hadamard": False, "promote": True}
    path = parse_score_path(q.dtype, **{**settings, "allow_tf32": False, **path_options})
    parsed = parse_options(q, k, **options)
    return prepare(q, k, v, parsed, path), parsed, path


@pytest.mark.parametrize(
    ("dtype", "path", "d", "options"),
    [
        (E4M3, {}, 64, {}),
        (E5M2, {}, 64, {"causal": "top_left"}),
        (E4M3, {"promote": False}, 48, {"window": (7, 20), "scale": -0.3}),
        (BF16, {"score": "e4m3", "hadamard": True}, 64, {"causal": "bottom_right"}),
        (torch.float32, {"score": "e5m2", "score_scales": "tensor"}, 128, {}),
    ],
    ids=str,
)
def test_bits_of_the_portable_kernel(dtype, path, d, options, device):
    wide = torch.float32 if dtype in (E4M3, E5M2) else dtype
    q, k, v = (x.to(dtype) for x in inputs(device, wide, batch=2, heads=2, kv_heads=1, nq=45, nk=50, d=d))
    operands, parsed, path = prepared(q, k, v, path, **options)
    assert fp8_possible(operands, parsed, path)
    expected = launch_forward(operands, parsed, path, TILE)
    got = launch_hopper_products(replace(operands, v=columns(operands.v)), parsed, path, TILE)
    assert got[0].dtype == path.output
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=str)
@pytest.mark.parametrize("length", [1, 16, 130])
def test_columns_keep_every_byte(dtype, length, device):
    """Of all codes, NaN with any payload included; a row stride and an offset among the inputs."""
    codes = torch.randint(0, 256, (2, 3, length + 1, 40), dtype=torch.uint8, device=device)
    x = codes.view(dtype)[:, :, 1:, 3:23]
    turned = columns(x)
    assert turned.shape == x.shape
    assert torch.equal(turned.view(torch.uint8), codes[:, :, 1:, 3:23])
    assert columns_readable(turned)
    assert not columns_readable(x)


def test_padding_of_turned_values_is_not_read(device):
    q, k, v = (x.to(E4M3) for x in inputs(device, torch.float32, nq=20, nk=37, d=64))
    operands, parsed, path = prepared(q, k, v, {})
    turned = columns(operands.v)
    clean = launch_hopper_products(replace(operands, v=turned), parsed, path, TILE)
    store = turned.mT.as_strided((*turned.mT.shape[:3], 48), turned.mT.stride())
    store[..., 37:] = math.nan
    dirty = launch_hopper_products(replace(operands, v=turned), parsed, path, TILE)
    assert bool(clean[0].isfinite().all())
    assert all(torch.equal(a, b) for a, b in zip(clean, dirty, strict=True))


def test_calls_that_go_to_the_portable_kernel(device):
    q, k, v = inputs(device, BF16, nq=20, nk=20, d=64)
    fp8 = {"score": "e4m3"}
    assert fp8_possible(*prepared(q, k, v, fp8))
    assert not fp8_possible(*prepared(q, k, v, {**fp8, "score_scales": "rows"}))
    assert not fp8_possible(*prepared(q, k, v, fp8, softcap=3.0))
    assert not fp8_possible(*prepared(q, k, v, {"score": "fp16"}))
    assert not fp8_possible(*prepared(q, k, v[..., :32], fp8))
    odd = [x[..., :40].to(E4M3) for x in (q, k, v)]  # rows that are not whole units of 16 bytes
    assert not fp8_possible(*prepared(*odd, {}))


def test_the_forward_takes_this_kernel(device, monkeypatch):
    """Forced, as on Hopper; v is turned only where it does not lie right already."""
    q, k, v = (x.to(E4M3) for x in inputs(device, torch.float32, nq=40, nk=50, d=64))
    expected = kernels.forward(q, k, v, causal="top_left")
    turned, launched = [], []
    monkeypatch.setattr(passes, "takes_fp8", fp8_possible)
    monkeypatch.setattr(passes, "columns", lambda x: turned.append(1) or columns(x))
    run = passes.launch_hopper_products
    monkeypatch.setattr(passes, "launch_hopper_products", lambda *a: launched.append(1) or run(*a))
    for values, count in ((v, 1), (columns(v), 1)):
        got = kernels.forward(q, k, values, causal="top_left")
        assert len(turned) == count
        assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
    assert len(launched) == 2
