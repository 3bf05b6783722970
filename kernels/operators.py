"""The passes as torch custom operators, so that autograd and torch.compile see through them.

``torch.ops.flash_kernels.forward`` and ``.backward``: both have fake kernels (shapes without data), and the
first has the second as its derivative. There is no second derivative. `differentiable_forward` goes past the
operators where nothing looks at them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from kernels.passes import run_backward, run_forward
from kernels.score_path import output_dtype

_OPTIONS = (
    "float? scale, str? causal, int? window_left, int? window_right, Tensor? mask, Tensor? bias, "
    "Tensor? alibi_slopes, float? softcap, Tensor? sink, Tensor? key_lengths, Tensor? cu_seqlens_q, "
    "Tensor? cu_seqlens_k, str? score, str? score_scales, int? score_rows, bool hadamard, bool promote, "
    "bool allow_tf32"
)
_NAMES = tuple(part.split()[-1] for part in _OPTIONS.split(", "))


def _keywords(values: tuple[Any, ...]) -> dict[str, Any]:
    """Options as keyword arguments of the passes, from their values in the order of the schema."""
    options = dict(zip(_NAMES, values, strict=True))
    window = (options.pop("window_left"), options.pop("window_right"))
    return {**options, "window": None if window == (None, None) else window}


@torch.library.custom_op(
    "flash_kernels::forward",
    mutates_args=(),
    schema=f"(Tensor q, Tensor k, Tensor v, {_OPTIONS}) -> (Tensor, Tensor)",
)
def forward_op(q: Tensor, k: Tensor, v: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
    return run_forward(q, k, v, **_keywords(options))


@forward_op.register_fake
def _(q: Tensor, _k: Tensor, v: Tensor, *_options: Any) -> tuple[Tensor, Tensor]:
    return (
        v.new_empty((*q.shape[:3], v.shape[3]), dtype=output_dtype(v.dtype)),
        q.new_empty(q.shape[:3], dtype=torch.float32),
    )


def _backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    dlse: Tensor | None,
    bias_gradient: bool,
    *options: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """dq, dk, dv, dbias, dsink; the last two are empty where there is none."""
    found = run_backward(
        dout, q, k, v, out, lse, dlse=dlse, bias_gradient=bias_gradient, **_keywords(options)
    )
    dbias, dsink = (found.get(name, dout.new_empty(0)) for name in ("dbias", "dsink"))
    return found["dq"], found["dk"], found["dv"], dbias, dsink


backward_op = torch.library.custom_op(
    "flash_kernels::backward",
    _backward,
    mutates_args=(),
    schema=f"(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor? dlse, "
    f"bool bias_gradient, {_OPTIONS}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)


@backward_op.register_fake
def _(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    _out: Tensor,
    _lse: Tensor,
    _dlse: Tensor | None,
    bias_gradient: bool,
    *options: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    given = dict(zip(_NAMES, options, strict=True))
    bias, sink = given["bias"] if bias_gradient else None, given["sink"]
    dq, dk, dv = (x.new_empty(x.shape, dtype=output_dtype(x.dtype)) for x in (q, k, v))
    dbias, dsink = (dout.new_empty(0) if x is None else x.new_empty(x.shape) for x in (bias, sink))
    return dq, dk, dv, dbias, dsink


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, *options = inputs
    # Tensors among the options are saved as tensors; the rest keep their places.
    ctx.places = [i for i, x in enumerate(options) if isinstance(x, Tensor)]
    ctx.plain = [None if isinstance(x, Tensor) else x for x in options]
    ctx.save_for_backward(q, k, v, *output, *(options[i] for i in ctx.places))
    ctx.set_materialize_grads(False)


def _derivative(
    ctx: Any, dout: Tensor | None, dlse: Tensor | None, through: Any = backward_op
) -> tuple[Tensor | None, ...]:
    q, k, v, out, lse, *tensors = ctx.saved_tensors
    options = list(ctx.plain)
    for place, x in zip(ctx.places, tensors, strict=True):
        options[place] = x
    bias_gradient = bool(ctx.needs_input_grad[3 + _NAMES.index("bias")])
    dout = torch.zeros_like(out) if dout is None else dout
    dq, dk, dv, dbias, dsink = through(dout, q, k, v, out, lse, dlse, bias_gradient, *options)
    by_name = {"bias": dbias if bias_gradient else None}
    by_name["sink"] = dsink if options[_NAMES.index("sink")] is not None else None
    return dq, dk, dv, *(by_name.get(name) for name in _NAMES)


forward_op.register_autograd(_derivative, setup_context=_setup_context)


class _Direct(torch.autograd.Function):
    """The same passes and derivative without the dispatcher, which costs more than a short call's kernels."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, Tensor]:
        q, k, v, *options = inputs
        output = run_forward(q, k, v, **_keywords(tuple(options)))
        _setup_context(ctx, inputs, output)
        return output

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        # Where a graph of the gradient is wanted, the operator refuses the second derivative.
        return _derivative(ctx, dout, dlse, backward_op if torch.is_grad_enabled() else _backward)


def differentiable_forward(q: Tensor, k: Tensor, v: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
    """`forward_op`, straight to the passes where nothing but autograd watches the call.

    Whatever traces, transforms or counts operators needs to see one: compilation, subclasses of tensors,
    dispatch and function modes, functorch.
    """
    given = [x for x in (q, k, v, *options) if isinstance(x, Tensor)]
    if _watched(given):
        return cast("tuple[Tensor, Tensor]", forward_op(q, k, v, *options))
    if torch.is_grad_enabled() and any(x.requires_grad for x in given):
        output = _Direct.apply(q, k, v, *options)  # type: ignore[no-untyped-call]
        return cast("tuple[Tensor, Tensor]", output)
    return run_forward(q, k, v, **_keywords(options))


def _watched(given: Sequence[Tensor]) -> bool:
    return (
        torch.compiler.is_compiling()
        or any(type(x) not in (Tensor, torch.nn.Parameter) or x.device.type == "meta" for x in given)
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._len_torch_function_stack() > 0
        or torch._C._functorch.peek_interpreter_stack() is not None
    )
