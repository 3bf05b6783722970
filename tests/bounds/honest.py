"""Honest runs of the emulator against the bounds: what the soundness and the term tests share."""

from __future__ import annotations

import torch
from torch import Tensor

from flashcheck.arithmetic import Arithmetic, Machine
from flashcheck.bounds.backward import backward_bound
from flashcheck.bounds.forward import forward_bound
from flashcheck.bounds.pairs import Given
from flashcheck.emulator.backward import backward
from flashcheck.emulator.forward import forward
from flashcheck.emulator.tiles import concrete
from flashcheck.formats import FORMATS, round_nearest
from flashcheck.oracle import fp64
from flashcheck.problem import Problem


def normal(shape: tuple[int, ...], seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def problem(
    fmt: str = "bf16",
    *,
    heads: tuple[int, int] = (1, 1),
    lengths: tuple[int, int] = (24, 80),
    dim: int = 16,
    seed: int = 0,
    sizes: tuple[float, float, float] = (1.0, 1.0, 1.0),
    dlse: bool = False,
    **options: object,
) -> Problem:
    """Normal q, k, v times ``sizes``, normal dout, and a gradient of the log-sum-exp if asked for."""
    form = FORMATS[fmt]
    shapes = ((1, heads[0], lengths[0], dim), (1, heads[1], lengths[1], dim), (1, heads[1], lengths[1], dim))
    q, k, v = (
        round_nearest(size * normal(shape, 10 * seed + n), form).to(form.dtype)
        for n, (shape, size) in enumerate(zip(shapes, sizes, strict=True))
    )
    out_type = form.dtype if form.precision > 4 else torch.bfloat16
    dout = normal(shapes[0], 10 * seed + 3).to(out_type)
    gradient = normal(shapes[0][:3], 10 * seed + 4).float() if dlse else None
    return Problem(q, k, v, dout=dout, dlse=gradient, **options)  # type: ignore[arg-type]


def margins(
    p: Problem,
    arithmetic: Arithmetic,
    machine: Machine,
    judge: tuple[Arithmetic, Machine] | None = None,
) -> dict[str, float]:
    """Worst margin by tensor of an emulated run: out, lse, out.C, and the gradients dq, dq.C, dq.end, ...

    Args:
        judge: the arithmetic and machine that the bounds assume; None: those that were run.
    """
    arithmetic = concrete(arithmetic)
    declared, model = (arithmetic, machine) if judge is None else (concrete(judge[0]), judge[1])
    exact = fp64.forward(p)
    result = forward(p, arithmetic, machine)
    assert result.lse is not None
    bound = forward_bound(p, exact, declared, model)
    worst = {"out": bound.out.interval.margin(result.out), "lse": bound.lse.interval.margin(result.lse)}
    if bound.out.centred is not None:
        worst["out.C"] = bound.out.centred.margin(result.out)
    got = backward(p, result.out, result.lse, arithmetic, machine)
    eager = declared.keeps_probabilities
    conditional = fp64.backward(p) if eager else fp64.backward(p, result.out, result.lse)
    scores = bound.scores
    given = Given(result.out, result.lse)
    bounds = backward_bound(p, exact, conditional, given, declared, model, scores, with_scale=True).tensors
    for name, tensor in bounds.items():
        if name in got:
            worst[name] = tensor.interval.margin(got[name])
            if tensor.centred is not None:
                worst[f"{name}.C"] = tensor.centred.margin(got[name])
    if not eager:
        free = Given(exact.out, exact.lse, bound.lse.interval.bound, bound.out.interval.bound)
        ends = backward_bound(p, exact, fp64.backward(p), free, declared, model, scores, with_scale=True)
        for name, tensor in ends.tensors.items():
            if name in got:
                worst[f"{name}.end"] = tensor.interval.margin(got[name])
    return {name: float(x.max()) for name, x in worst.items()}
