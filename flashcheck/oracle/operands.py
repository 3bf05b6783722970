"""A problem's tensors as exact float64 values, in the shapes that the vectorised rungs work on."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flashcheck.formats import to_float64
from flashcheck.problem import Problem


@dataclass(frozen=True, slots=True)
class Operands:
    """The rows of one call; R rows, B batch, H query heads, Hkv key heads, all on the device of q.

    Attributes:
        q: (B, H, R, dim); k: (B, Hkv, Nk, dim); v: (B, Hkv, Nk, dv).
        visible: (B, H, R, Nk) boolean.
        bias: broadcasts to (B, H, R, Nk), or None.
        slopes: (B or 1, H, 1, 1) ALiBi slopes, or None; distance: (1, 1, R, Nk) what they multiply.
        sink: (1, H, 1), or None.
        dout: (B, H, R, dv) and dlse: (B, H, R); zero where the problem gives none.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    visible: Tensor
    bias: Tensor | None
    slopes: Tensor | None
    distance: Tensor | None
    sink: Tensor | None
    dout: Tensor
    dlse: Tensor

    @property
    def alive(self) -> Tensor:
        """(B, H, R): rows that see a key."""
        return self.visible.any(-1)


def operands(problem: Problem, rows: Tensor | None = None) -> Operands:
    """The operands of the query rows ``rows`` (all rows when None)."""
    device = problem.q.device
    q = to_float64(problem.q)
    shape = (problem.batch, problem.num_heads, problem.num_queries)
    dout = torch.zeros(*shape, problem.value_dim) if problem.dout is None else problem.dout
    dlse = torch.zeros(shape) if problem.dlse is None else problem.dlse
    dout, dlse = to_float64(dout).to(device), to_float64(dlse).to(device)
    bias = None if problem.bias is None else to_float64(problem.bias).to(device)
    if rows is not None:
        q, dout, dlse = q[:, :, rows], dout[:, :, rows], dlse[:, :, rows]
        bias = bias[:, :, rows] if bias is not None and bias.shape[2] > 1 else bias
    slopes, distance = _alibi(problem, rows)
    return Operands(
        q=q,
        k=to_float64(problem.k),
        v=to_float64(problem.v),
        visible=problem.visible(rows).to(device),
        bias=bias,
        slopes=slopes,
        distance=distance,
        sink=None if problem.sink is None else to_float64(problem.sink).to(device).view(1, -1, 1),
        dout=dout,
        dlse=dlse,
    )


def _alibi(problem: Problem, rows: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    if problem.alibi_slopes is None:
        return None, None
    slopes = to_float64(problem.alibi_slopes).to(problem.q.device)
    slopes = slopes.view(1, -1, 1, 1) if slopes.ndim == 1 else slopes[:, :, None, None]
    rows = torch.arange(problem.num_queries) if rows is None else rows
    aligned = problem.diagonal("bottom_right").key_of(rows).view(1, 1, -1, 1)
    distance = -(aligned - torch.arange(problem.num_keys)).abs().double()
    return slopes, distance.to(problem.q.device)


def without_hidden(problem: Problem, x: Operands) -> Operands:
    """``x`` with zero in place of rows that see no key and of keys that no row of their group sees."""
    seen = by_kv_head(problem, x.visible)
    keys, alive = seen.any(2).unsqueeze(-1), x.alive.unsqueeze(-1)
    return Operands(
        q=torch.where(alive, x.q, 0.0),
        k=torch.where(keys, x.k, 0.0),
        v=torch.where(keys, x.v, 0.0),
        visible=x.visible,
        bias=x.bias,
        slopes=x.slopes,
        distance=x.distance,
        sink=x.sink,
        dout=torch.where(alive, x.dout, 0.0),
        dlse=torch.where(x.alive, x.dlse, 0.0),
    )


def by_kv_head(problem: Problem, x: Tensor) -> Tensor:
    """(B, H, R, ...) as (B, Hkv, group * R, ...): the rows that share a key head, one below the other."""
    return x.reshape(problem.batch, problem.num_kv_heads, problem.group * x.shape[2], *x.shape[3:])


def by_head(problem: Problem, x: Tensor) -> Tensor:
    """The inverse of ``by_kv_head``."""
    return x.reshape(problem.batch, problem.num_heads, x.shape[2] // problem.group, *x.shape[3:])


def masked_matmul(weights: Tensor, visible: Tensor, values: Tensor) -> Tensor:
    """``weights @ values`` in which a hidden pair contributes nothing, whatever the value is.

    A plain product turns 0 * NaN into NaN, so that one poisoned key reaches the rows that do not see
    it. Here NaN and inf follow IEEE rules for visible pairs and stay away from all others.

    Args:
        weights: (..., n, m), 0 where hidden.
        visible: (..., n, m) boolean.
        values: (..., m, d).
    """
    if bool(torch.isfinite(values.sum())):  # else some may be infinite, or their sum
        return weights @ values
    finite = torch.isfinite(values)
    result = weights @ torch.where(finite, values, 0.0)

    def reached(pairs: Tensor, poisoned: Tensor) -> Tensor:
        return (pairs.double() @ poisoned.double()) > 0

    up, down = weights > 0, weights < 0
    positive = reached(up, values == torch.inf) | reached(down, values == -torch.inf)
    negative = reached(up, values == -torch.inf) | reached(down, values == torch.inf)
    undefined = reached(visible, torch.isnan(values)) | reached(visible & ~up & ~down, torch.isinf(values))
    result = torch.where(positive, result + torch.inf, result)
    result = torch.where(negative, result - torch.inf, result)
    return torch.where(undefined, torch.nan, result)


def hidden_finite(x: Tensor, visible: Tensor) -> Tensor:
    """``x`` with 0 in place of NaN and inf at hidden pairs; visible pairs and finite values stay."""
    if bool(torch.isfinite(x.sum())):
        return x
    return torch.where(visible | torch.isfinite(x), x, 0.0)


def stored_rows(stored: Tensor | None, rows: Tensor | None) -> Tensor | None:
    """Rows of a stored output (B, H, Nq, dv) or log-sum-exp (B, H, Nq), as float64."""
    if stored is None:
        return None
    return to_float64(stored if rows is None else stored[:, :, rows])


def reduce_like(x: Tensor, shape: torch.Size) -> Tensor:
    """``x`` summed over the dimensions that ``shape`` broadcasts: the gradient of a broadcast."""
    wide = [dim for dim, (n, m) in enumerate(zip(shape, x.shape, strict=True)) if n != m]
    return x.sum(wide, keepdim=True) if wide else x
