"""The two passes on checked arguments: which kernels run, in which order."""

from __future__ import annotations

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
from kernels.hopper.calls import takes
from kernels.hopper.forward import launch_hopper_forward
from kernels.options import check_gradients, check_tensors, parse_options


def run_forward(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    """(out, lse); see `kernels.forward`."""
    check_tensors(q, k, v)
    parsed = parse_options(q, k, **options)
    interpreter.repair()
    if takes(q, k, v, parsed):
        return launch_hopper_forward(q, k, v, parsed)
    return launch_forward(q, k, v, parsed)


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
    check_gradients(dout, q, v, out, lse, dlse)
    parsed = parse_options(q, k, **options)
    interpreter.repair()
    delta = launch_delta(dout, out, dlse)
    gradients = {}
    if takes(q, k, v, parsed, dout):
        lse = lse if lse.stride(2) == 1 else lse.contiguous()
        gradients["dq"] = launch_hopper_dq(dout, q, k, v, lse, delta, parsed)
        gradients["dk"], gradients["dv"] = launch_hopper_dkdv(dout, q, k, v, lse, delta, parsed)
    else:
        gradients["dq"] = launch_dq(dout, q, k, v, lse, delta, parsed)
        gradients["dk"], gradients["dv"] = launch_dkdv(dout, q, k, v, lse, delta, parsed)
    bias, sink = options.get("bias"), options.get("sink")
    if bias is not None and bias_gradient:
        gradients["dbias"] = launch_dbias(dout, q, k, v, lse, delta, bias, parsed)
    if sink is not None:
        # The sink is a key with probability exp(sink - lse), value zero and so dP = 0; one of -inf is none.
        logit = sink.detach().float()[:, None]
        probability = torch.where(logit == -torch.inf, 0.0, (logit - lse).exp())
        gradients["dsink"] = -(probability * delta).sum((0, 2)).to(sink.dtype)
    return gradients
