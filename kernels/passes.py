"""The two passes on checked arguments: which kernels run, in which order."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from kernels import interpreter
from kernels.backward_dbias import launch_dbias
from kernels.backward_delta import launch_delta
from kernels.backward_dkdv import launch_dkdv
from kernels.backward_dq import launch_dq
from kernels.forward_kernel import launch_forward
from kernels.hopper.backward_dkdv import launch_hopper_dkdv
from kernels.hopper.backward_dq import launch_hopper_dq
from kernels.hopper.calls import columns_readable, takes, takes_fp8
from kernels.hopper.forward import launch_hopper_forward, launch_hopper_products
from kernels.operands import Gradients
from kernels.options import check_gradients, check_tensors, parse_options, read_anew
from kernels.quantise import columns, prepare
from kernels.score_path import ScorePath, parse_score_path


def run_forward(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    """(out, lse); see `kernels.forward`."""
    check_tensors(q, k, v)
    path = _score_path(q, options)
    parsed = parse_options(q, k, **options)
    interpreter.repair()
    if not path.converts and takes(q, k, v, parsed):
        return launch_hopper_forward(q, k, v, parsed)
    parsed = read_anew(parsed)
    operands = prepare(q, k, v, parsed, path)
    if takes_fp8(operands, parsed, path):
        if not columns_readable(operands.v):
            operands = replace(operands, v=columns(operands.v))
        return launch_hopper_products(operands, parsed, path)
    return launch_forward(operands, parsed, path)


def run_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    dlse: Tensor | None = None,
    bias_gradient: bool = True,
    **options: Any,
) -> dict[str, Tensor]:
    """Gradients by name; see `kernels.backward`. That of the bias only if ``bias_gradient``."""
    check_tensors(q, k, v)
    path = _score_path(q, options)
    check_gradients(dout, q, v, out, lse, dlse, path)
    parsed = parse_options(q, k, **options)
    interpreter.repair()
    delta = launch_delta(dout, out, dlse)
    if not path.converts and takes(q, k, v, parsed, dout):
        # No bias and no sink here: these are all the gradients.
        lse = lse if lse.stride(2) == 1 else lse.contiguous()
        dq = launch_hopper_dq(dout, q, k, v, lse, delta, parsed)
        dk, dv = launch_hopper_dkdv(dout, q, k, v, lse, delta, parsed)
        return {"dq": dq, "dk": dk, "dv": dv}
    parsed = read_anew(parsed)
    operands = prepare(q, k, v, parsed, path)
    rounded = path.operand == "tf32"
    given = (operands.q, operands.k, operands.v) if rounded else (q, k, v)
    tensors = Gradients(*given, dout, lse, delta)
    gradients = {"dq": launch_dq(tensors, operands, parsed, path)}
    gradients["dk"], gradients["dv"] = launch_dkdv(tensors, operands, parsed, path)
    bias, sink = options.get("bias"), options.get("sink")
    if bias is not None and bias_gradient:
        gradients["dbias"] = launch_dbias(tensors, operands, bias, parsed, path)
    if sink is not None:
        # The sink is a key with probability exp(sink - lse), value zero and so dP = 0; one of -inf is none.
        logit = sink.detach().float()[:, None]
        probability = torch.where(logit == -torch.inf, 0.0, (logit - lse).exp())
        gradients["dsink"] = -(probability * delta).sum((0, 2)).to(sink.dtype)
    return gradients


def _score_path(q: Tensor, options: dict[str, Any]) -> ScorePath:
    """The path of a call; takes its options out of ``options``."""
    return parse_score_path(
        q.dtype,
        options.pop("score", None),
        options.pop("score_scales", None),
        options.pop("score_rows", None),
        bool(options.pop("hadamard", False)),
        bool(options.pop("promote", True)),
        bool(options.pop("allow_tf32", False)),
    )
