"""The tensors that a pass works on."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Operands:
    """What enters the products.

    Attributes:
        q, k, v: in the score path's format.
        q_factor, k_factor: fp32 (batch, heads, length or 1), what their rows are multiplied by; or None.
        v_factor: fp32 (batch, kv heads, 1), or None.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    q_factor: Tensor | None = None
    k_factor: Tensor | None = None
    v_factor: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Gradients:
    """What the backward takes besides: the inputs as they were given, and what follows from the output.

    Attributes:
        q, k, v: as given (TF32: as rounded for the forward); dout: gradient of the output.
        lse, delta: (batch, heads, Nq) fp32.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    lse: Tensor
    delta: Tensor
