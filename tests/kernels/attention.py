"""The definition of attention in float64, for the tests of the kernels; and inputs for it."""

import torch


def make(shape, dtype, seed, device="cpu"):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(dtype).to(device)


def band(num_queries, num_keys, causal):
    """Boolean (Nq, Nk), True where visible."""
    i, j = torch.arange(num_queries)[:, None], torch.arange(num_keys)[None, :]
    shift = num_keys - num_queries if causal == "bottom_right" else 0
    seen = torch.ones(num_queries, num_keys, dtype=torch.bool)
    return seen if causal is None else seen & (j <= i + shift)


def attention(q, k, v, *, scale=None, causal=None):
    """(out, lse) in float64 on the CPU; rows without a visible key are 0 and -inf."""
    q, k, v = (x.cpu().double() for x in (q, k, v))
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    scale = q.shape[3] ** -0.5 if scale is None else scale
    seen = band(q.shape[2], k.shape[2], causal)
    s = (scale * (q @ k.mT)).masked_fill(~seen, -torch.inf)
    lse = s.logsumexp(-1) if k.shape[2] else s.new_full(s.shape[:3], -torch.inf)
    p = (s - lse[..., None]).exp().masked_fill(~seen, 0.0)
    return p @ v, lse


# Largest accepted error in O relative to the largest |v|, and in the log-sum-exp relative to 1 + |lse|. The
# proper judgement of accuracy is the checker's; these catch a wrong formula, mask or index.
TOLERANCE = {torch.float32: 4e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def assert_close(out, lse, q, k, v, **options):
    expected_out, expected_lse = attention(q, k, v, **options)
    assert out.dtype == v.dtype
    assert lse.dtype == torch.float32
    assert out.shape == expected_out.shape
    assert lse.shape == expected_lse.shape
    out, lse = out.cpu().double(), lse.cpu().double()
    empty = expected_lse == -torch.inf
    assert torch.equal(lse == -torch.inf, empty)
    assert bool((out[empty] == 0).all())
    largest = max(1.0, float(v.abs().max()) if v.numel() else 0.0)
    assert bool(((out - expected_out).abs() <= TOLERANCE[v.dtype] * largest).all())
    error = (lse - expected_lse)[~empty].abs()
    assert bool((error <= 4e-6 * (1 + expected_lse[~empty].abs())).all())
