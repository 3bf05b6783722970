"""What an oracle returns: the exact answer's values and the quantities that the bounds need.

Shapes use B batch, H query heads, Nq queries, Nk keys, dv value dim. Everything is float64. Masked
pairs hold -inf in ``scores`` and 0 elsewhere.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class ForwardQuantities:
    """Exact forward values, rounded to float64 by the oracle.

    Attributes:
        out: (B, H, Nq, dv); 0 in rows that see no key.
        lse: (B, H, Nq); natural log; -inf in rows that see no key (the sink's logit if there is one).
        products: (B, H, Nq, Nk) scale * q . k, before softcap, bias and mask; defined for hidden pairs too.
        scores: (B, H, Nq, Nk) s_ij, -inf where hidden.
        probabilities: (B, H, Nq, Nk) p_ij.
        row_max: (B, H, Nq) m_i, the largest score (the sink included); -inf in empty rows without a sink.
        row_sum: (B, H, Nq) l_i = sum_j exp(s_ij - m_i), the sink's term included; 0 in empty rows
            without a sink.
        visible: (B, H, Nq, Nk) boolean.
    """

    out: Tensor
    lse: Tensor
    products: Tensor
    scores: Tensor
    probabilities: Tensor
    row_max: Tensor
    row_sum: Tensor
    visible: Tensor


@dataclass(frozen=True, slots=True)
class BackwardQuantities:
    """Exact gradients and what their bounds need.

    Attributes:
        dq, dk, dv: shapes of q, k, v (dk and dv summed over the query heads of a group).
        dbias: shape of the bias, or None; dsink: (H,), or None; dscale: scalar.
        probabilities: (B, H, Nq, Nk) exp(s - lse); grad_probabilities: dP = dO V^T;
        grad_scores: dS = P (dP - delta), before the softcap derivative.
        delta: (B, H, Nq) rowsum(dO * O), less the gradient of the LSE.
    """

    dq: Tensor
    dk: Tensor
    dv: Tensor
    dbias: Tensor | None
    dsink: Tensor | None
    dscale: Tensor
    probabilities: Tensor
    grad_probabilities: Tensor
    grad_scores: Tensor
    delta: Tensor
