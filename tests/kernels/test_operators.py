"""flash_attention under autograd, and its operators under torch's own checks."""

import contextlib

import pytest
import torch

import kernels
from kernels import operators
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


def watchers(device):
    """Contexts and arguments under which something other than autograd looks at operators."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.overrides import TorchFunctionMode
    from torch.utils._python_dispatch import TorchDispatchMode

    class Dispatch(TorchDispatchMode):
        def __torch_dispatch__(self, func, _types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    class Function(TorchFunctionMode):
        def __torch_function__(self, func, _types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    class Subclass(torch.Tensor):
        pass

    q, k, v, *_ = everything(device)
    with FakeTensorMode() as fake:
        faked = [fake.from_tensor(x) for x in (q, k, v)]
    return {
        "fake": (contextlib.nullcontext(), faked),
        "dispatch": (Dispatch(), (q, k, v)),
        "function": (Function(), (q, k, v)),
        "subclass": (contextlib.nullcontext(), (q.as_subclass(Subclass), k, v)),
        "meta": (contextlib.nullcontext(), [x.to("meta") for x in (q, k, v)]),
        "functorch": (None, (q, k, v)),
    }


@pytest.mark.parametrize("name", ["fake", "dispatch", "function", "subclass", "meta", "functorch"])
def test_whatever_watches_sees_an_operator(name, device, monkeypatch):
    seen = []
    run = operators.forward_op
    monkeypatch.setattr(operators, "forward_op", lambda *a: seen.append(1) or run(*a))
    context, tensors = watchers(device)[name]
    if context is None:
        with contextlib.suppress(RuntimeError):  # torch's own operators made in Python refuse it
            torch.func.grad(lambda q: kernels.flash_attention(q, *tensors[1:]).sum())(tensors[0])
    else:
        with context:
            kernels.flash_attention(*tensors)
    assert seen


@pytest.mark.parametrize("return_lse", [False, True])
def test_past_the_operator_every_bit_is_the_same(return_lse, device, monkeypatch):
    def call():
        leaves = dict(zip(("q", "k", "v", "bias", "sink"), everything(device), strict=True))
        for name in ("q", "v", "bias", "sink"):
            leaves[name].requires_grad_()
        found = kernels.flash_attention(**leaves, causal="top_left", return_lse=return_lse)
        sum(x.square().sum() for x in (found if return_lse else (found,))).backward()
        return [x for x in (found if return_lse else (found,))] + [x.grad for x in leaves.values()]

    direct = call()
    monkeypatch.setattr(operators, "_watched", lambda _: True)
    for one, other in zip(direct, call(), strict=True):
        assert (one is None and other is None) or torch.equal(one, other)


def test_nothing_is_recorded_without_a_gradient(device):
    q, k, v, *_ = everything(device)
    assert kernels.flash_attention(q, k, v).grad_fn is None
    with torch.no_grad():
        assert kernels.flash_attention(q.requires_grad_(), k, v).grad_fn is None
    assert kernels.flash_attention(q, k, v).grad_fn is not None


def test_a_second_derivative_is_refused(device):
    q, k, v, *_ = everything(device)
    (gradient,) = torch.autograd.grad(
        kernels.flash_attention(q.requires_grad_(), k, v).sum(), q, create_graph=True
    )
    with pytest.raises(RuntimeError, match="no autograd formula"):
        gradient.sum().backward()
