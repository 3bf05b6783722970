"""First rung: attention in float64, forward and analytic backward, for every option of the contract.

Batched matrix products on the device of the problem; nothing loops over heads. What float64 itself
gets wrong is bounded in ``own_error.py``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flashcheck.masks import Everything
from flashcheck.oracle.operands import (
    Operands,
    by_head,
    by_kv_head,
    hidden_finite,
    masked_matmul,
    operands,
    reduce_like,
    stored_rows,
)
from flashcheck.oracle.quantities import BackwardQuantities, ForwardQuantities
from flashcheck.problem import Problem


def forward(problem: Problem, rows: Tensor | None = None) -> ForwardQuantities:
    """Output, log-sum-exp and the quantities that bounds need, for the query rows ``rows`` (None: all).

    Args:
        rows: integer tensor of query indices; the result's row dimension follows it.
    """
    x = operands(problem, rows)
    return _forward(problem, x)[0]


def backward(
    problem: Problem,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    rows: Tensor | None = None,
) -> BackwardQuantities:
    """Gradients by the analytic formulas, with respect to the *stored* q, k, v and to ``scale``.

    Args:
        out: (B, H, Nq, dv) stored output, lse: (B, H, Nq) stored log-sum-exp; the gradients are then
            those of a backward that reads these values. None: from scratch.
        rows: integer tensor of query indices: what these rows alone add to each gradient; dq, dbias
            and the (B, H, Nq, ...) fields then have these rows only.
    """
    x = operands(problem, rows)
    out, lse = stored_rows(out, rows), stored_rows(lse, rows)
    exact, raw = _forward(problem, x)
    p, p_sink = _probabilities(problem, x, exact, lse)
    out = exact.out if out is None else out.to(p.device)

    # dP = dO V^T, delta = rowsum(dO * O) - dLSE; empty rows add nothing, whatever they store.
    dp = by_head(problem, by_kv_head(problem, x.dout) @ x.v.mT) * problem.v_descale
    dp = hidden_finite(dp, x.visible)
    delta = torch.where(x.alive, (x.dout * out).sum(-1) - x.dlse, 0.0)
    ds = _where_seen(problem, x, p * (dp - delta.unsqueeze(-1)), 0.0)
    dx = ds if problem.softcap is None else ds * _softcap_slope(exact.products, problem.softcap)
    dx = ds if dx is ds else _where_seen(problem, x, dx, 0.0)

    dx_rows, seen = by_kv_head(problem, dx), by_kv_head(problem, x.visible)
    dq = by_head(problem, masked_matmul(dx_rows, seen, x.k)) * problem.effective_scale
    dk = masked_matmul(dx_rows.mT, seen.mT, by_kv_head(problem, x.q)) * problem.effective_scale
    dv = masked_matmul(by_kv_head(problem, p).mT, seen.mT, by_kv_head(problem, x.dout)) * problem.v_descale
    dscale = _where_seen(problem, x, dx * raw, 0.0).sum() * (problem.q_descale * problem.k_descale)
    return BackwardQuantities(
        dq=dq,
        dk=dk,
        dv=dv,
        dbias=None if x.bias is None else reduce_like(ds, x.bias.shape),
        dsink=None if p_sink is None else torch.where(x.alive, -p_sink * delta, 0.0).sum((0, 2)),
        dscale=dscale,
        probabilities=p,
        grad_probabilities=dp,
        grad_scores=ds,
        delta=delta,
    )


def _forward(problem: Problem, x: Operands) -> tuple[ForwardQuantities, Tensor]:
    """The forward quantities, and q . k of the stored values (B, H, R, Nk)."""
    raw, products, scores = _scores(problem, x)
    m = scores.amax(-1) if scores.shape[-1] else torch.full_like(x.dlse, -torch.inf)
    m = m if x.sink is None else torch.maximum(m, x.sink)
    shift = torch.where(m == -torch.inf, 0.0, m)  # -inf - -inf is NaN
    w = _where_seen(problem, x, torch.exp(scores - shift.unsqueeze(-1)), 0.0)
    l = w.sum(-1)
    l = l if x.sink is None else l + torch.exp(x.sink - shift)
    p = w / torch.where(l == 0, 1.0, l).unsqueeze(-1)
    p = _where_seen(problem, x, p, 0.0)  # a NaN row must not make its hidden pairs NaN
    weighted = masked_matmul(by_kv_head(problem, p), by_kv_head(problem, x.visible), x.v)
    exact = ForwardQuantities(
        out=by_head(problem, weighted) * problem.v_descale,
        lse=m + torch.log(l),
        products=products,
        scores=scores,
        probabilities=p,
        row_max=m,
        row_sum=l,
        visible=x.visible,
    )
    return exact, raw


def _scores(problem: Problem, x: Operands) -> tuple[Tensor, Tensor, Tensor]:
    """q . k, scale * q . k, and the scores with softcap, bias, ALiBi and mask; each (B, H, R, Nk)."""
    raw = by_head(problem, by_kv_head(problem, x.q) @ x.k.mT)
    raw = hidden_finite(raw, x.visible)
    products = raw * problem.effective_scale
    scores = products
    if problem.softcap is not None:
        scores = problem.softcap * torch.tanh(products / problem.softcap)
    if x.bias is not None:
        scores = scores + x.bias
    if x.slopes is not None and x.distance is not None:
        scores = scores + x.slopes * x.distance
    return raw, products, _where_seen(problem, x, scores, -torch.inf)


def _softcap_slope(products: Tensor, softcap: float) -> Tensor:
    """softcap'(x) = sech(x / c)^2; as 1 - tanh^2 it would cancel where the cap bites."""
    return torch.cosh(products / softcap) ** -2.0


def _probabilities(
    problem: Problem, x: Operands, exact: ForwardQuantities, lse: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """p (B, H, Nq, Nk) and the sink's probability (B, H, Nq) or None, from a stored LSE if there is one."""
    if lse is None:
        p_sink = None if x.sink is None else torch.exp(x.sink - exact.row_max) / exact.row_sum
        return exact.probabilities, p_sink
    lse = torch.where(x.alive, lse.to(x.q.device), 0.0)  # an empty row's -inf is not used
    p = torch.exp(exact.scores - lse.unsqueeze(-1))
    p_sink = None if x.sink is None else torch.exp(x.sink - lse)
    return _where_seen(problem, x, p, 0.0), p_sink


def _where_seen(problem: Problem, x: Operands, values: Tensor, hidden: float) -> Tensor:
    """``values`` (B, H, R, Nk) of visible pairs and ``hidden`` elsewhere."""
    if isinstance(problem.visibility, Everything):
        return values
    return torch.where(x.visible, values, hidden)
