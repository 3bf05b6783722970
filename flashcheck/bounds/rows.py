"""The softmax rows as the bounds see them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from flashcheck.bounds.numbers import ORACLE_SHARE, UNIT
from flashcheck.bounds.scores import ScoreError
from flashcheck.bounds.spread import Deviations
from flashcheck.oracle.quantities import ForwardQuantities
from flashcheck.problem import Problem


@dataclass(frozen=True)
class SoftmaxRows:
    """The rows as the bounds see them: a sink is one more key whose value is 0.

    Shapes: n keys (Nk, or Nk + 1 with a sink). Everything float64; hidden pairs are neutral.

    Attributes:
        problem: where they come from.
        mask: (B, H, Nq, n) 1.0 where visible, live and finite, 0.0 elsewhere; None where everything is.
        gap: (B, H, Nq, n) m - s, 0 where hidden; p: 0 where hidden.
        values: (B, Hkv, n, dv), non-finite values replaced by 0 (their rows are not judged here).
        out: (B, H, Nq, dv); row_max, row_sum, lse: (B, H, Nq, 1), 0 / 1 / 0 in empty rows.
        live: (B, H, Nq, 1) rows that see something and whose exact answer is finite.
        own: (B, H, Nq, n) score errors.
        all_live: every row is live.
    """

    problem: Problem
    mask: Tensor | None
    gap: Tensor
    p: Tensor
    values: Tensor
    out: Tensor
    row_max: Tensor
    row_sum: Tensor
    lse: Tensor
    live: Tensor
    own: Tensor
    has_sink: bool
    all_live: bool

    @property
    def num_keys(self) -> int:
        """Keys of a row, the sink included."""
        return self.p.shape[-1]

    @cached_property
    def deviations(self) -> Deviations:
        """Distances of the values from the output."""
        return Deviations(self.problem, self.values, self.out)

    @cached_property
    def sizes(self) -> Tensor:
        """|values|; not to be changed in place."""
        return self.values.abs()

    @property
    def log_p(self) -> Tensor:
        """ln p, -inf where hidden; finite where p itself underflows."""
        log_p = self.row_max - self.gap - self.lse
        return log_p if self.mask is None else torch.where(self.mask > 0, log_p, -torch.inf)

    def hide(self, x: Tensor) -> Tensor:
        """``x`` with 0 at hidden pairs."""
        return x if self.mask is None else torch.where(self.mask > 0, x, 0.0)


def softmax_rows(problem: Problem, exact: ForwardQuantities, errors: ScoreError) -> SoftmaxRows:
    """The rows of a problem; ``errors`` are its scores' (THEORY.md 3.1)."""
    values = problem.v.double() * problem.v_descale
    if not math.isfinite(float(values.sum())):
        values = values.nan_to_num(0.0, 0.0, 0.0)
    scores, p, own, mask = exact.scores, exact.probabilities, errors.own * ORACLE_SHARE, errors.visible
    if problem.sink is not None:
        sink = problem.sink.double().view(1, -1, 1, 1).expand(*exact.lse.shape, 1)
        scores = torch.cat([scores, sink], -1)
        weight = torch.exp(sink - exact.row_max.unsqueeze(-1)) / exact.row_sum.unsqueeze(-1)
        p = torch.cat([p, weight.nan_to_num(0.0)], -1)
        own = torch.cat([own, 3 * UNIT * ORACLE_SHARE * sink.abs().nan_to_num(0.0, 0.0, 0.0)], -1)
        values = torch.nn.functional.pad(values, (0, 0, 0, 1))
        if mask is None and not bool(torch.isfinite(problem.sink).all()):
            mask = torch.ones_like(errors.own)
        if mask is not None:
            mask = torch.cat([mask, torch.isfinite(sink).double()], -1)
    row_max, row_sum, lse, out = exact.row_max, exact.row_sum, exact.lse, exact.out
    row_max, row_sum, lse = row_max.unsqueeze(-1), row_sum.unsqueeze(-1), lse.unsqueeze(-1)
    gap = row_max - scores
    live = torch.ones_like(row_max, dtype=torch.bool)
    all_live = math.isfinite(float(torch.add(row_max, lse).sum() + out.sum()))
    if not all_live:
        live = torch.isfinite(row_max) & torch.isfinite(lse) & torch.isfinite(out).all(-1, keepdim=True)
        out, row_sum, lse = (
            torch.where(live, x, other) for x, other in ((out, 0.0), (row_sum, 1.0), (lse, 0.0))
        )
        # NaN and inf of rows that are not judged here must not reach the sums over all rows.
        p, own, gap = (torch.where(live, x, 0.0) for x in (p, own, gap))
        row_max = torch.where(live, row_max, 0.0)
        alive = live.double().expand_as(p)
        mask = alive if mask is None else mask * alive
    # A visible score of -inf (an infinite operand or bias) carries no weight, exactly as a hidden one.
    if bool(gap.numel()) and not float(gap.amax()) < torch.inf:
        if problem.bias is not None or not math.isfinite(float(problem.k.double().sum())):
            finite = torch.isfinite(gap)
            own = torch.where(finite, own, 0.0)
            mask = finite.double() if mask is None else mask * finite
        gap.nan_to_num_(0.0, 0.0, 0.0)
    return SoftmaxRows(
        problem=problem,
        mask=mask,
        gap=gap,
        p=p,
        values=values,
        out=out,
        row_max=row_max,
        row_sum=row_sum,
        lse=lse,
        live=live,
        own=own,
        has_sink=problem.sink is not None,
        all_live=all_live,
    )
