"""flash_decode: split keys and paged caches against the definition in float64."""

import math

import pytest
import torch

import kernels
from kernels.decode import flash_decode
from tests.kernels.attention import TOLERANCE, assert_close, attention, inputs

NAN = math.nan


def paged(x, page_size, seed=0):
    """x (batch, heads, length, dim) scattered over pages, all else NaN; the pages and the block table."""
    batch, heads, length, dim = x.shape
    count = -(-length // page_size)
    order = torch.randperm(batch * count + 3, generator=torch.Generator().manual_seed(seed))
    table = order[: batch * count].view(batch, count).to(x.device)
    pages = torch.full((len(order), heads, page_size, dim), NAN, dtype=x.dtype, device=x.device)
    for b in range(batch):
        for n in range(count):
            rows = x[b, :, n * page_size : (n + 1) * page_size]
            pages[table[b, n], :, : rows.shape[1]] = rows
    return pages, table


def check(q, k, v, lengths=None, **options):
    """Each sequence by itself, over its own keys."""
    out, lse = flash_decode(q, k, v, key_lengths=lengths, return_lse=True, **options)
    options.pop("num_splits", None)
    for b in range(q.shape[0]):
        stop = k.shape[2] if lengths is None else int(lengths[b])
        part = (q[b : b + 1], k[b : b + 1, :, :stop], v[b : b + 1, :, :stop])
        assert_close(out[b : b + 1], lse[b : b + 1], *part, **options)
    return out, lse


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("num_splits", [None, 1, 3, 50])
def test_splits(dtype, num_splits, device):
    """50 shares of 5 tiles leave most shares empty."""
    q, k, v = inputs(device, dtype, batch=2, heads=6, kv_heads=2, nq=1, nk=300, d=40, dv=24)
    check(q, k, v, num_splits=num_splits)


@pytest.mark.parametrize(
    "options",
    [
        {"causal": "bottom_right"},
        {"causal": "bottom_right", "window": (20, None)},
        {"window": (9, 1), "scale": -0.3},
        {"softcap": 3.0},
        {"sink": torch.tensor([0.5, -1.0, 3.0, -math.inf])},
        {"scale": 0.0},
    ],
    ids=str,
)
def test_options(options, device):
    """A few speculated tokens over sequences of any length: one empty, one shorter than its queries."""
    options = {n: x.to(device) if isinstance(x, torch.Tensor) else x for n, x in options.items()}
    q, k, v = inputs(device, torch.bfloat16, batch=4, heads=4, kv_heads=2, nq=3, nk=150)
    check(q, k, v, torch.tensor([150, 67, 0, 2], device=device), num_splits=3, **options)


def test_one_split_is_the_forward(device):
    """The same steps in the same order: the same bits, but for the merge, whose factor is 1."""
    q, k, v = inputs(device, torch.bfloat16, heads=2, nq=16, nk=64)
    got = flash_decode(q, k, v, num_splits=1, return_lse=True)
    assert all(torch.equal(a, b) for a, b in zip(got, kernels.forward(q, k, v), strict=True))


@pytest.mark.parametrize("page_size", [1, 16, 24, 64])
def test_pages(page_size, device):
    """Pages hold the same rows elsewhere: the same bits. Unused pages and the last page's end hold NaN."""
    q, k, v = inputs(device, torch.float16, batch=2, heads=4, kv_heads=2, nq=2, nk=100)
    k_pages, table = paged(k, page_size)
    v_pages, _ = paged(v, page_size)
    lengths = torch.tensor([100, 37], device=device)
    got = flash_decode(
        q, k_pages, v_pages, block_table=table, key_lengths=lengths, num_splits=2, return_lse=True
    )
    expected = flash_decode(q, k, v, key_lengths=lengths, num_splits=2, return_lse=True)
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
    table[1, -(-37 // page_size) :] = 10**6  # entries behind the length are not used
    again = flash_decode(
        q, k_pages, v_pages, block_table=table, key_lengths=lengths, num_splits=2, return_lse=True
    )
    assert all(torch.equal(a, b) for a, b in zip(again, expected, strict=True))


def test_the_cache_behind_the_length_may_hold_nan(device):
    q, k, v = inputs(device, torch.bfloat16, batch=2, nq=1, nk=90)
    lengths = torch.tensor([31, 64], device=device)
    clean = flash_decode(q, k, v, key_lengths=lengths, num_splits=2)
    for b, length in enumerate((31, 64)):
        k[b, :, length:], v[b, :, length:] = NAN, NAN
    assert torch.equal(flash_decode(q, k, v, key_lengths=lengths, num_splits=2), clean)


def test_flash_attn_layout(device):
    """A cache stored as (pages, page size, kv heads, dim)."""
    q, k, v = inputs(device, torch.float32, nq=1, nk=32)
    stored = [paged(x, 16)[0].transpose(1, 2).contiguous() for x in (k, v)]
    table = paged(k, 16)[1].to(torch.int32)
    lengths = torch.tensor([32], device=device)
    views = [x.transpose(1, 2) for x in stored]
    out = flash_decode(q, *views, block_table=table, key_lengths=lengths)
    exact, _ = attention(q, k, v)
    assert bool(((out.cpu() - exact).abs() <= TOLERANCE[torch.float32]).all())


def test_fp8_cache(device):
    q, k, v = (x.to(torch.float8_e4m3fn) for x in inputs(device, nq=1, nk=90, d=20))
    out = flash_decode(q, k, v, num_splits=2)
    exact, _ = attention(q, k, v)
    assert out.dtype == torch.bfloat16
    assert bool(((out.cpu() - exact).abs() <= (2**-4 + 2**-8) * v.float().abs().max().cpu()).all())


def test_parts_that_overflow_are_not_finite(device):
    """Scores past fp32 in one share: NaN or the limit, as in the forward."""
    q, k, v = (x.abs() for x in inputs(device, nq=1, nk=90))
    k[:, :, 70] = math.inf
    assert bool(flash_decode(q, k, v, num_splits=3).isnan().all())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_splits": 0}, "num_splits is 0"),
        ({"causal": "top_left"}, "causal is 'top_left'"),
        ({"block_table": torch.zeros(3, 2, dtype=torch.int64)}, "block_table is"),
        ({"block_table": torch.zeros(1, 2)}, "block_table is"),
        ({"key_lengths": torch.tensor([1, 2])}, "key_lengths is"),
        ({"k_cache": torch.zeros(1, 2, 30, 16)}, r"v has \(heads, length\)"),
    ],
    ids=str,
)
def test_errors(change, message, device):
    q, k, v = inputs(device, nq=1, nk=32)
    change = {n: x.to(device) if isinstance(x, torch.Tensor) else x for n, x in change.items()}
    arguments = {"q": q, "k_cache": k, "v_cache": v, **change}
    with pytest.raises(ValueError, match=message):
        flash_decode(**arguments)


def test_sequences_do_not_depend_on_each_other(device):
    """One sequence alone, or in a batch with others, with the same number of splits: the same bits."""
    q, k, v = inputs(device, torch.bfloat16, batch=3, nq=1, nk=80)
    whole = flash_decode(q, k, v, num_splits=3)
    for b in range(3):
        alone = flash_decode(q[b : b + 1], k[b : b + 1], v[b : b + 1], num_splits=3)
        assert torch.equal(alone, whole[b : b + 1])
