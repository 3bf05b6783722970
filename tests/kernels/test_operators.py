"""flash_attention under autograd, and its operators under torch's own checks."""

import pytest
import torch

import kernels
from tests.kernels.attention import assert_gradients_close, gradients, inputs, make


def everything(device, dtype=torch.float32):
    q, k, v = inputs(device, dtype, heads=4, kv_heads=2, nq=20, nk=30, d=16)
    return q, k, v, make((1, 4, 1, 30), dtype, 5, device), make((4,), torch.float32, 6, device)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_autograd(dtype, device):
    leaves = dict(zip(("q", "k", "v", "bias", "sink"), everything(device, dtype), strict=True))
    exact = gradients(
        *(leaves[n] for n in ("q", "k", "v")),
        make((1, 4, 20, 16), dtype, 7, device),
        make((1, 4, 20), torch.float32, 8, device),
        bias=leaves["bias"],
        sink=leaves["sink"],
        causal="bottom_right",
        softcap=4.0,
        window=(9, None),
    )
    for x in leaves.values():
        x.requires_grad_()
    out, lse = kernels.flash_attention(
        **leaves, causal="bottom_right", softcap=4.0, window=(9, None), return_lse=True
    )
    loss = (out * make(out.shape, dtype, 7, device)).float().sum()
    (loss + (lse * make(lse.shape, torch.float32, 8, device)).sum()).backward()
    assert_gradients_close({f"d{n}": x.grad for n, x in leaves.items()}, exact, dtype)


def test_unused_gradients_are_not_made(device):
    q, k, v, bias, sink = everything(device)
    q.requires_grad_()
    kernels.flash_attention(q, k, v, bias=bias, sink=sink).sum().backward()
    assert q.grad is not None
    assert bias.grad is None
    kernels.flash_attention(q, k, v, return_lse=True)[1].sum().backward()


def test_a_gradient_that_does_not_exist_is_refused(device):
    q, k, v, *_ = everything(device)
    with pytest.raises(ValueError, match=r"alibi_slopes\.requires_grad is True"):
        kernels.flash_attention(q, k, v, alibi_slopes=torch.ones(4, device=device, requires_grad=True))


@pytest.mark.parametrize("differentiable", [False, True])
def test_opcheck(differentiable, device):
    q, k, v, bias, sink = (x.requires_grad_(differentiable) for x in everything(device))
    mask = torch.ones(1, 1, 20, 30, dtype=torch.bool, device=device)
    options = (None, "top_left", 5, None, mask, bias, None, 3.0, sink, None, None, None)
    forward, plain = torch.ops.flash_kernels.forward.default, (None, None, None, False, True, False)
    torch.library.opcheck(forward, (q, k, v, *options, *plain))
    nothing = (None,) * len(options)
    torch.library.opcheck(forward, (q, k, v, *nothing, "e4m3", "rows", 16, True, True, False))


def test_compiled_without_graph_breaks(device):
    q, k, v, *_ = everything(device)
    q.requires_grad_()

    def loss(q, k, v):
        return kernels.flash_attention(q * 2, k, v, causal="bottom_right").square().sum()

    # The eager back end runs the traced graph as it is: tracing is what is tested, not code generation.
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    (expected,) = torch.autograd.grad(loss(q, k, v), q)
    (got,) = torch.autograd.grad(compiled(q, k, v), q)
    assert torch.equal(got, expected)
