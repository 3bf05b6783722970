"""Gradients of torch's ``flex_attention`` at a stored O and LSE; both of its forms read them.

The eager form runs the operator behind the function: the function itself refuses gradients on the CPU. P is
exp(s - L) in fp32 and is rounded into the input format before it meets dO; dP and delta are fp32; dS is
multiplied by the scale in fp32, rounded into the input format and meets K and Q in it; dK and dV of grouped
heads are rounded per query head.

The compiled form is differentiated as users do it. The operator keeps the LSE in base 2 and the function
converts it on its way out, so ours is converted back.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from flashcheck.adapters.given_forward import gradients_given
from flashcheck.adapters.torch_flex_call import attend, block_mask_of, score_mod_of, without_padding
from flashcheck.adapters.torch_products import sums_in_fp32
from flashcheck.problem import Problem

_LN2 = float(torch.tensor(math.log(2.0)))
"""As the operator multiplies by it, in fp32: dividing by the same number leaves two roundings of the LSE."""

NAMES = ("dq", "dk", "dv")


@sums_in_fp32()
def by_operator(problem: Problem, out: Tensor, lse: Tensor) -> Mapping[str, Tensor]:
    """dq, dk, dv of the eager form."""
    from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex
    from torch._higher_order_ops.flex_attention import create_fw_bw_graph, flex_attention_backward
    from torch.nn.attention.flex_attention import _create_empty_block_mask, _identity

    assert problem.dout is not None
    p = without_padding(problem)
    score_mod = score_mod_of(p) or _identity
    block_mask = block_mask_of(p) or _create_empty_block_mask(p.q, p.k)
    # As the function's own autograd traces the derivative: on a score of the inputs' dtype.
    score = p.q.new_zeros((), requires_grad=True)
    b, h, i, j = (p.q.new_zeros((), dtype=torch.int) for _ in range(4))
    joint_graph: Any
    with torch.enable_grad(), TransformGetItemToIndex():
        forward_graph, joint_graph = create_fw_bw_graph(score_mod, (score, b, h, i, j), ())
    with torch.no_grad():
        dq, dk, dv, _ = flex_attention_backward(
            p.q,
            p.k,
            p.v,
            out,
            (lse.double() / _LN2).float(),
            problem.dout,
            None,
            forward_graph,
            joint_graph,
            block_mask.as_tuple(),
            p.effective_scale,
            {},
        )
    return dict(zip(NAMES, (dq, dk, dv), strict=True))


def by_autograd(
    attention: Callable[..., Any], problem: Problem, out: Tensor, lse: Tensor
) -> Mapping[str, Tensor]:
    """dq, dk, dv of ``attention``, flex_attention in some form, by automatic differentiation."""
    assert problem.dout is not None
    p = without_padding(problem)

    def call(leaves: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        return attend(attention, p, *(leaves[name] for name in NAMES))

    inputs = dict(zip(NAMES, (p.q, p.k, p.v), strict=True))
    return gradients_given(call, inputs, (out, lse), [problem.dout], lse_unit=_LN2)
