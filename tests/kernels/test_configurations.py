"""Every block size of the tables on exact problems and poisoned memory; the order of the grid; repeats."""

import math

import pytest
import torch
import triton
import triton.language as tl

import kernels
from kernels import orders
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
def test_order_of_the_grid_changes_no_bit(device):
    """Programs of every launch run in shuffled order: none may rely on another having run before."""
    ordered = everything(device)
    with orders.launches(0) as moved:
        shuffled = everything(device)
    assert any(count > 3 for count in moved)
    for name, x in ordered.items():
        assert torch.equal(shuffled[name], x), name


@triton.jit
def _tickets(p_out, p_count):
    """Every program writes how many ran before it."""
    ticket = tl.load(p_count)
    place = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
    tl.store(p_out + place, ticket)
    tl.store(p_count, ticket + 1)


@pytest.mark.skipif(not interpreted(), reason="a GPU orders its programs itself")
@pytest.mark.parametrize("grid", [(2,), (7,), (3, 4)], ids=str)
def test_launches_are_shuffled_and_complete(grid, device):
    """Inside, every program runs once, in another order; outside, and after a failure, in the usual one."""
    count = math.prod(grid)

    def tickets():
        out, counter = (torch.zeros(n, dtype=torch.int32, device=device) for n in (count, 1))
        _tickets[(*grid, 1)](out, counter)
        return out.tolist()

    usual = list(range(count))
    assert tickets() == usual
    with orders.launches(5) as moved:
        shuffled = tickets()
    assert shuffled != usual
    assert sorted(shuffled) == usual
    assert moved == [count]
    with pytest.raises(ZeroDivisionError), orders.launches(5):
        raise ZeroDivisionError
    assert tickets() == usual


def test_pages_hold_the_cache(device):
    """The table leads to every row; all else is NaN; no page lies where it would without a table."""
    k, v = (make((2, 3, 12, d), torch.float16, d, device) for d in (4, 5))
    assert orders.in_pages(k, v) is None
    with orders.pages(1) as moved:
        k_pages, v_pages, table = orders.in_pages(k, v)
    assert moved == [table.numel()]
    for x, pages in ((k, k_pages), (v, v_pages)):
        assert torch.equal(pages[table].transpose(1, 2).flatten(2, 3), x)
        assert int(torch.isnan(pages).sum()) == pages.numel() - x.numel()
