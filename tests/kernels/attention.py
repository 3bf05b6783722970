"""The definition of attention in float64, for the tests of the kernels; and inputs for it."""

import torch


def make(shape, dtype, seed, device="cpu"):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(dtype).to(device)


def inputs(device, dtype=torch.float32, batch=1, heads=2, kv_heads=None, nq=33, nk=47, d=16, dv=None, seed=0):
    """q, k, v of a problem."""
    kv_heads, dv = kv_heads or heads, dv or d
    return (
        make((batch, heads, nq, d), dtype, seed, device),
        make((batch, kv_heads, nk, d), dtype, seed + 1, device),
        make((batch, kv_heads, nk, dv), dtype, seed + 2, device),
    )


def aligned_keys(nq, nk, alignment, cu_q=None, cu_k=None):
    """Key on the diagonal of each query, (Nq, 1); and which pairs lie in one segment, (Nq, Nk)."""
    i, j = torch.arange(nq)[:, None], torch.arange(nk)[None, :]
    if cu_q is None:
        return i + (nk - nq if alignment == "bottom_right" else 0), torch.ones(nq, nk, dtype=torch.bool)
    aligned, together = torch.zeros(nq, 1, dtype=torch.int64), torch.zeros(nq, nk, dtype=torch.bool)
    for s in range(len(cu_q) - 1):
        q0, q1, k0, k1 = int(cu_q[s]), int(cu_q[s + 1]), int(cu_k[s]), int(cu_k[s + 1])
        shift = (k1 - k0) - (q1 - q0) if alignment == "bottom_right" else 0
        aligned[q0:q1] = i[q0:q1] - q0 + k0 + shift
        together[q0:q1] = (j >= k0) & (j < k1)
    return aligned, together


def attention(
    q,
    k,
    v,
    *,
    scale=None,
    causal=None,
    window=None,
    mask=None,
    bias=None,
    alibi_slopes=None,
    softcap=None,
    sink=None,
    key_lengths=None,
    cu_seqlens_q=None,
    cu_seqlens_k=None,
):
    """(out, lse) in float64 on the CPU, differentiable; rows without a visible key are 0 and -inf."""
    q, k, v = (x.cpu().double() for x in (q, k, v))
    nq, nk = q.shape[2], k.shape[2]
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    s = (q.shape[3] ** -0.5 if scale is None else scale) * (q @ k.mT)
    if softcap is not None:
        s = softcap * torch.tanh(s / softcap)
    if bias is not None:
        s = s + bias.cpu().double()
    j = torch.arange(nk)[None, :]
    if alibi_slopes is not None:
        slopes = alibi_slopes.cpu().double().expand(q.shape[0], q.shape[1])
        aligned, _ = aligned_keys(nq, nk, "bottom_right", cu_seqlens_q, cu_seqlens_k)
        s = s - slopes[:, :, None, None] * (aligned - j).abs()
    aligned, seen = aligned_keys(nq, nk, causal or "bottom_right", cu_seqlens_q, cu_seqlens_k)
    if causal is not None:
        seen = seen & (j <= aligned)
    if window is not None and window[0] is not None:
        seen = seen & (j >= aligned - window[0])
    if window is not None and window[1] is not None:
        seen = seen & (j <= aligned + window[1])
    seen = seen.expand(s.shape)
    if mask is not None:
        seen = seen & mask.cpu()
    if key_lengths is not None:
        seen = seen & (j < key_lengths.cpu()[:, None, None, None])
    seen = seen & (s.detach() != -torch.inf)
    # exp of a finite stand-in where hidden, then zero: no NaN enters the graph.
    s = torch.where(seen, s, torch.zeros(()).double())
    top = torch.where(seen, s, -torch.inf).detach()
    top = top.amax(-1, keepdim=True) if nk else s.new_full((*s.shape[:3], 1), -torch.inf)
    if sink is not None:
        sink = sink.cpu().double()[None, :, None, None]
        top = torch.maximum(top, sink.detach())
    base = torch.where(top == -torch.inf, 0.0, top)
    p = torch.where(seen, (s - base).exp(), 0.0)
    total = p.sum(-1, keepdim=True)
    if sink is not None:
        total = total + (sink - base).exp()
    empty = total == 0
    lse = torch.where(empty, -torch.inf, torch.where(empty, 1.0, total).log() + base)[..., 0]
    return (p / torch.where(empty, 1.0, total)) @ v, lse


def gradients(q, k, v, dout, dlse=None, *, bias=None, sink=None, **options):
    """Gradients of sum(out * dout) + sum(lse * dlse) in float64, by name."""
    leaves = {"q": q, "k": k, "v": v, "bias": bias, "sink": sink}
    leaves = {n: x.detach().cpu().double().requires_grad_() for n, x in leaves.items() if x is not None}
    extra = {n: leaves[n] for n in ("bias", "sink") if n in leaves}
    out, lse = attention(leaves["q"], leaves["k"], leaves["v"], **extra, **options)
    loss = (out * dout.cpu().double()).sum()
    if dlse is not None:
        loss = loss + torch.where(lse == -torch.inf, 0.0, lse * dlse.cpu().double()).sum()
    found = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    return {
        f"d{n}": torch.zeros_like(x) if g is None else g
        for (n, x), g in zip(leaves.items(), found, strict=True)
    }


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


def assert_gradients_close(got, expected, dtype):
    assert set(got) == set(expected)
    for name, exact in expected.items():
        value = got[name].cpu().double()
        assert value.shape == exact.shape, name
        largest = max(1e-3, float(exact.abs().max()) if exact.numel() else 0.0)
        worst = float((value - exact).abs().max()) / largest if exact.numel() else 0.0
        assert worst <= 3 * TOLERANCE[dtype], (name, worst)
