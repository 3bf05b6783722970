"""The softmax rows as the bounds see them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flashcheck.bounds.numbers import ORACLE_SHARE, UNIT
from flashcheck.bounds.scores import ScoreError
from flashcheck.oracle.quantities import ForwardQuantities
from flashcheck.problem import Problem


@dataclass(frozen=True, slots=True)
class SoftmaxRows:
    """The rows as the bounds see them: a sink is one more key whose value is 0.

    Shapes: n keys (Nk, or Nk + 1 with a sink). Everything float64; hidden pairs are neutral.

    Attributes:
        visible, scores, log_p, p: (B, H, Nq, n); hidden scores equal the row maximum, hidden p are 0.
        values: (B, H, n, dv), non-finite values replaced by 0 (their rows are not judged here).
        out: (B, H, Nq, dv); row_max, row_sum, lse: (B, H, Nq, 1), 0 / 1 / 0 in empty rows.
        live: (B, H, Nq, 1) rows that see something and whose exact answer is finite.
        own: (B, H, Nq, n) score errors, ``constant`` and ``additive`` as in ScoreError.
    """

    visible: Tensor
    scores: Tensor
    log_p: Tensor
    p: Tensor
    values: Tensor
    out: Tensor
    row_max: Tensor
    row_sum: Tensor
    lse: Tensor
    live: Tensor
    own: Tensor
    has_sink: bool


def softmax_rows(problem: Problem, exact: ForwardQuantities, errors: ScoreError) -> SoftmaxRows:
    values = problem.v.double().repeat_interleave(problem.group, 1) * problem.v_descale
    visible, scores, own = exact.visible, exact.scores, errors.own
    if problem.sink is not None:
        sink = problem.sink.double().view(1, -1, 1, 1).expand(*exact.lse.shape, 1)
        visible = torch.cat([visible, torch.isfinite(sink)], -1)
        scores = torch.cat([scores, sink], -1)
        own = torch.cat([own, 3 * UNIT * sink.abs().nan_to_num(0.0, 0.0, 0.0)], -1)
        values = torch.nn.functional.pad(values, (0, 0, 0, 1))
    finite = torch.isfinite(exact.out).all(-1) & torch.isfinite(exact.lse) & torch.isfinite(exact.row_max)
    live = (finite & visible.any(-1)).unsqueeze(-1)
    row_max = torch.where(live, exact.row_max.unsqueeze(-1), 0.0)
    lse = torch.where(live, exact.lse.unsqueeze(-1), 0.0)
    # Visible scores of -inf (an infinite operand) carry no weight, exactly as hidden ones.
    visible = visible & live & torch.isfinite(scores)
    scores = torch.where(visible, scores, row_max)
    log_p = torch.where(visible, scores - lse, -torch.inf)
    return SoftmaxRows(
        visible=visible,
        scores=scores,
        log_p=log_p,
        p=torch.exp(log_p),
        values=values.nan_to_num(0.0, 0.0, 0.0),
        out=torch.where(live, exact.out, 0.0),
        row_max=row_max,
        row_sum=torch.where(live, exact.row_sum.unsqueeze(-1), 1.0),
        lse=lse,
        live=live,
        own=torch.where(visible, own, 0.0) * ORACLE_SHARE,
        has_sink=problem.sink is not None,
    )
