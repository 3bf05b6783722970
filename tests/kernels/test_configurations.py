"""Every block size of the tables on exact problems and poisoned memory; the order of the grid; repeats."""

import random

import pytest
import torch
import triton

import kernels
from kernels.decode import flash_decode
from kernels.interpreter import interpreted
from tests.kernels.attention import inputs, make
from tests.kernels.exactness import configurations, distinct_blocks, faults

ALL = distinct_blocks(configurations()) if interpreted() else configurations()


@pytest.mark.parametrize("configuration", ALL, ids=str)
def test_exact(configuration, device):
    sizes = {"num_queries": 70, "num_keys": 140} if interpreted() else {}
    assert faults(configuration, device, **sizes) == []


def test_a_wrong_bit_is_seen(device, monkeypatch):
    """The check itself can fail: one weight more than there should be."""
    (configuration,) = [c for c in ALL if c.kernel == "forward" and c.dtype == torch.float16][:1]
    monkeypatch.setattr("tests.kernels.exactness.launch_forward", broken_forward)
    assert faults(configuration, device, num_queries=20, num_keys=40) != []


def broken_forward(operands, parsed, path, tile):
    from kernels.forward_kernel import launch_forward

    operands.k[:, :, 0] = operands.k[:, :, 1]
    return launch_forward(operands, parsed, path, tile)


def everything(device):
    """One call of each pass, with several tiles, heads and segments."""
    q, k, v = inputs(device, torch.bfloat16, batch=1, heads=2, kv_heads=1, nq=70, nk=70, d=16)
    bias = make((1, 2, 1, 70), torch.bfloat16, 5, device)
    options = {"causal": "bottom_right", "bias": bias}
    out, lse = kernels.forward(q, k, v, **options)
    found = {"out": out, "lse": lse}
    found |= kernels.backward(make(out.shape, out.dtype, 9, device), q, k, v, out, lse, **options)
    found["fp8"] = kernels.forward(q, k, v, score="e4m3", score_scales="rows", score_rows=16)[0]
    found["decode"] = flash_decode(q, k, v, num_splits=2)
    return found


@pytest.mark.skipif(not interpreted(), reason="a GPU orders its programs itself; on_gpu.py repeats them")
def test_order_of_the_grid_changes_no_bit(device, monkeypatch):
    """Programs of every launch run in shuffled order: none may rely on another having run before."""
    ordered = everything(device)
    builder = triton.runtime.interpreter.InterpreterBuilder
    original_dim, original_index = builder.set_grid_dim, builder.set_grid_idx
    rng, orders = random.Random(0), {}

    def set_grid_dim(self, *dims):
        original_dim(self, *dims)
        orders[id(self)] = rng.sample(range(dims[0]), dims[0])

    def set_grid_idx(self, x, y, z):
        original_index(self, orders[id(self)][x], y, z)

    monkeypatch.setattr(builder, "set_grid_dim", set_grid_dim)
    monkeypatch.setattr(builder, "set_grid_idx", set_grid_idx)
    shuffled = everything(device)
    assert orders
    assert any(len(order) > 3 and order != sorted(order) for order in orders.values())
    for name, x in ordered.items():
        assert torch.equal(shuffled[name], x), name
