"""Coarse bounds on float64's own error, from norms alone: what lets an ordinary row skip the full proof.

``own_error`` is sharp and costs several passes over all pairs. Here sum |q||k| is replaced by the product of
norms, |v| by its largest entry in a column, and sums over keys by their worst term, in closed form. An
ordinary row has room for a factor of 10^6, so it passes; the others go to ``own_error``, and from there up
the ladder. README, "The screen".
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from flashcheck.oracle.operands import by_kv_head, reduce_like
from flashcheck.oracle.quantities import BackwardQuantities, ForwardQuantities
from flashcheck.oracle.unit import FP64
from flashcheck.problem import Problem

_EVALUATION = 1.0 + 2.0**-16
"""Pays for the roundings of the screen itself and for second-order terms."""

_LIMIT = 2.0**-10
"""Exponents that err by more are left to ``own_error``."""

_TINY = 2.0**-990
"""More than what underflow can take from one weight, in units of the row sum."""


_NAMES = ("dq", "dk", "dv", "dbias", "dsink")


@dataclass(frozen=True, slots=True)
class _Rows:
    """(B, H, Nq) each: a limit on |score|, on a score's error, and on |scale q . k| and its error."""

    size: Tensor
    error: Tensor
    product: Tensor
    product_error: Tensor


def forward_error(problem: Problem, got: ForwardQuantities) -> tuple[Tensor, Tensor]:
    """Bounds on the errors of ``fp64.forward``: out (B, H, Nq, dv), lse (B, H, Nq); inf where it cannot say.

    Rows whose visible data is not finite have no error to bound; what is returned for them means nothing.
    """
    n, op = problem.num_keys, FP64.operation
    rows = _rows(problem)
    exponent = _exponent_error(problem, rows)
    grown = torch.expm1(exponent) * torch.exp(exponent)
    largest = _largest(problem.v, -2).repeat_interleave(problem.group, 1)  # (B, H, 1, dv)
    relative = (2.0 * grown + FP64.dot(n + 1) + FP64.dot(n) + 2 * op).unsqueeze(-1)
    out = (relative * largest + n * _TINY * largest) * problem.v_descale + 2 * op * got.out.abs()
    log_sum = math.log(n + 2)
    lse = exponent + n * _TINY + FP64.dot(n + 1) + op + FP64.log * log_sum + FP64.log_absolute
    lse = lse + op * (got.lse.abs() + got.row_max.abs())
    alive = got.visible.any(-1)
    known = torch.isfinite(exponent)
    out = torch.where(known.unsqueeze(-1), out * _EVALUATION + _TINY, torch.inf)
    lse = torch.where(known, lse * _EVALUATION + _TINY, torch.inf)
    return torch.where(alive.unsqueeze(-1), out, 0.0), torch.where(alive, lse, 0.0)


def backward_error(
    problem: Problem,
    forward: ForwardQuantities,
    got: BackwardQuantities,
    *,
    out: Tensor | None = None,
    lse: Tensor | None = None,
) -> dict[str, Tensor]:
    """Bounds on the errors of ``fp64.backward`` by name (dscale is left out); inf where it cannot say.

    Args:
        out, lse: the stored values on which ``got`` is conditional, None where it is from scratch.
    """
    op, n, dim = FP64.operation, problem.num_keys, problem.value_dim
    if not n or not problem.num_queries:  # nothing is computed: every gradient is 0
        return {name: torch.full_like(x, _TINY) for name in _NAMES if (x := getattr(got, name)) is not None}
    alive = forward.visible.any(-1)
    rows = _rows(problem)
    if lse is None:
        exponent = _exponent_error(problem, rows)
        relative = 2.0 * torch.expm1(exponent) * torch.exp(exponent) + FP64.dot(n + 1) + 2 * op
        inherited = forward_error(problem, forward)[0].amax(-1)
        log_sum = forward.lse
    else:
        log_sum = torch.where(alive, lse.double(), 0.0)
        relative = torch.expm1(_exponent_error(problem, rows, log_sum))
        inherited = torch.zeros_like(rows.size)
    used = torch.where(alive.unsqueeze(-1), (forward.out if out is None else out).double(), 0.0)
    dout = torch.zeros_like(used) if problem.dout is None else problem.dout.double()
    dout = torch.where(alive.unsqueeze(-1), dout, 0.0)
    dlse = torch.zeros_like(rows.size) if problem.dlse is None else problem.dlse.double().abs()

    values = _norms(problem.v).amax(-1, keepdim=True).repeat_interleave(problem.group, 1) * problem.v_descale
    size = _norms(dout) * (values + _norms(used)) * _EVALUATION + dlse  # >= |dP - delta|
    moved = (FP64.dot(dim) + 6 * op) * size + dout.abs().sum(-1) * inherited
    per_p = relative * (size + moved) + moved + op * size  # error of dS, per unit of P
    through = per_p
    if problem.softcap is not None:
        z_error = rows.product_error / problem.softcap + op * rows.product / problem.softcap
        slope = torch.expm1(2.0 * z_error) + FP64.sech2
        through = per_p * (1 + slope) + size * (slope + op)
    known = torch.isfinite(through) & torch.isfinite(relative) | ~alive
    relative, per_p, through = (torch.where(known, x, torch.inf) for x in (relative, per_p, through))

    p = got.probabilities
    terms = problem.group * problem.num_queries
    scale = abs(problem.effective_scale)

    def from_keys(weight: Tensor) -> Tensor:
        """(B, Hkv, Nk, 1): sum over the rows of a group of P times a weight per row."""
        weighted = torch.where(p > 0, p * weight.unsqueeze(-1), 0.0)
        return by_kv_head(problem, weighted).sum(2).unsqueeze(-1)

    def bounded(error: Tensor, computed: Tensor) -> Tensor:
        error = (error + 4 * op * computed.abs()) * _EVALUATION + _TINY
        return torch.where(torch.isnan(error), torch.inf, error)

    grouped_dout = by_kv_head(problem, dout.abs()).amax(2, keepdim=True)
    queries = by_kv_head(problem, torch.where(alive.unsqueeze(-1), _finite(problem.q).abs(), 0.0))
    largest_k = _largest(problem.k, -2).repeat_interleave(problem.group, 1)
    row_weight = torch.where(p.sum(-1) > 0, p.sum(-1) * (through + FP64.dot(n) * size), 0.0)
    floor = _TINY * (n + terms) * (1 + size.sum())
    errors = {
        "dq": bounded(scale * (row_weight.unsqueeze(-1) + floor) * largest_k, got.dq),
        "dk": bounded(
            scale * (from_keys(through + FP64.dot(terms) * size) + floor) * queries.amax(2, keepdim=True),
            got.dk,
        ),
        "dv": bounded(
            problem.v_descale * (from_keys(relative + FP64.dot(terms)) + floor) * grouped_dout, got.dv
        ),
    }
    if got.dbias is not None:
        each = torch.where(p > 0, p * (per_p + FP64.dot(p.numel()) * size).unsqueeze(-1), 0.0)
        errors["dbias"] = bounded(reduce_like(each, got.dbias.shape) + floor, got.dbias)
    if got.dsink is not None and problem.sink is not None:
        sink = torch.exp(problem.sink.double().view(1, -1, 1) - torch.where(alive, log_sum, torch.inf))
        sink_error = per_p + FP64.dot(problem.batch * terms) * size
        errors["dsink"] = bounded(
            torch.where(sink > 0, sink * sink_error, 0.0).sum((0, 2)) + floor, got.dsink
        )
    return errors


def _rows(problem: Problem) -> _Rows:
    """Sizes and errors of a row's scores, hidden ones included."""
    op = FP64.operation
    keys = _norms(problem.k).amax(-1, keepdim=True).repeat_interleave(problem.group, 1)
    product = abs(problem.effective_scale) * _norms(problem.q) * keys * _EVALUATION
    product_error = product * (FP64.dot(problem.head_dim) + 2 * op)
    size, error = product, product_error
    if problem.softcap is not None:
        size = product.clamp(max=problem.softcap)
        error = error + size * (2 * op + FP64.tanh) + problem.softcap * FP64.tanh_absolute
    for added, roundings in ((_largest_bias(problem), 1), (_largest_alibi(problem), 2)):
        if added is not None:
            size = size + added
            error = error + roundings * op * size
    return _Rows(size, error * _EVALUATION, product, product_error)


def _exponent_error(problem: Problem, rows: _Rows, log_sum: Tensor | None = None) -> Tensor:
    """Largest |delta_j| of a row (README, Softmax), inf past 2^-10; with a stored LSE, of exp(s - L)."""
    size = 2.0 * rows.size
    if log_sum is not None:
        size = rows.size + log_sum.abs()
    if problem.sink is not None:
        size = size + problem.sink.double().abs().view(1, -1, 1)
    error = (rows.error + FP64.operation * size - math.log1p(-FP64.exp)) * _EVALUATION
    return torch.where(error <= _LIMIT, error, torch.inf)


def _largest_bias(problem: Problem) -> Tensor | None:
    if problem.bias is None:
        return None
    return _finite(problem.bias).abs().amax() if problem.bias.numel() else torch.zeros(())


def _largest_alibi(problem: Problem) -> Tensor | None:
    if problem.alibi_slopes is None:
        return None
    return problem.alibi_slopes.double().abs().amax() * (problem.num_queries + problem.num_keys)


def _finite(x: Tensor) -> Tensor:
    """float64, with 0 in place of NaN and inf: no judged row sees them."""
    return x.double().nan_to_num(0.0, 0.0, 0.0)


def _norms(x: Tensor) -> Tensor:
    """Limits on the Euclidean norms of the rows, (..., rows) or a single 0 where there are none.

    sqrt(dim) times the largest entry: squares would underflow or overflow.
    """
    if not x.shape[-2]:
        return x.new_zeros(*x.shape[:2], 1, dtype=torch.float64)
    return _largest(x, -1).squeeze(-1) * math.sqrt(x.shape[-1])


def _largest(x: Tensor, dim: int) -> Tensor:
    """Largest magnitude along ``dim``, kept; 0 where there is none."""
    if not x.shape[dim]:
        return x.new_zeros(*x.shape[:2], 1, x.shape[-1], dtype=torch.float64)
    largest = x.double().abs().amax(dim, keepdim=True)
    if math.isfinite(float(largest.sum())):
        return largest
    return _finite(x).abs().amax(dim, keepdim=True)
