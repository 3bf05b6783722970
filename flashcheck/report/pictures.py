"""Matrices of each dtype's worst problems: where the error lies, and which keys it can come from."""

from __future__ import annotations

import torch
from torch import Tensor

from flashcheck.certify import Outcome, TensorSummary
from flashcheck.checks.record import Location
from flashcheck.inputs.spec import ProblemSpec
from flashcheck.oracle import fp64
from flashcheck.report.certificate import PicturePart
from flashcheck.report.upgrade import problem_id

LARGEST = 40
"""Cells a side at most: a picture is looked at, not measured."""


def pictures_of(outcome: Outcome) -> list[PicturePart]:
    """Per dtype: O, and the gradient with the largest margin."""
    parts: list[PicturePart] = []
    for dtype in outcome.plan.dtypes:
        known = {t: s for (d, t), s in outcome.tensors.items() if d == dtype and s.worst is not None}
        gradients = [t for t in known if t.startswith("d")]
        chosen = [t for t in ("O",) if t in known]
        chosen += sorted(gradients, key=lambda t: -_margin(known[t]))[:1]
        for tensor in chosen:
            parts += _pictures(dtype, tensor, known[tensor])
    return parts


def _margin(summary: TensorSummary) -> float:
    return summary.worst.margin if summary.worst else 0.0


def _pictures(dtype: str, tensor: str, summary: TensorSummary) -> list[PicturePart]:
    worst, spec, margins = summary.worst, summary.worst_spec, summary.detail.worst_margins
    if worst is None or spec is None or margins is None or 0 in margins.shape:
        return []
    parts = [_part(dtype, tensor, "margin", spec, worst, margins)]
    if tensor == "O" and spec.num_keys:
        parts.append(_part(dtype, tensor, "key_share", spec, worst, _key_share(spec, worst)))
    return parts


def _key_share(spec: ProblemSpec, worst: Location) -> Tensor:
    """(Nq, Nk) float64: p_ij max_d |v_jd - o_id|."""
    problem = spec.build()
    exact = fp64.forward(problem)
    b, h = worst.index[:2]
    v = problem.v[b, h // problem.group].double()
    share = torch.stack(
        [p * (v - o).abs().amax(-1) for p, o in zip(exact.probabilities[b, h], exact.out[b, h], strict=True)]
    )
    return torch.nan_to_num(share, nan=0.0, posinf=torch.finfo(torch.float64).max)


def _part(
    dtype: str, tensor: str, kind: str, spec: ProblemSpec, worst: Location, matrix: Tensor
) -> PicturePart:
    return PicturePart(
        dtype=dtype,
        tensor=tensor,
        kind=kind,  # type: ignore[arg-type]
        problem=problem_id(spec.to_json()),
        head=(worst.index[0], worst.index[1]),
        size=(matrix.shape[0], matrix.shape[1]),
        worst=(worst.index[2], worst.index[3] if kind == "margin" else None),
        values=[[float(f"{x:.2g}") for x in row] for row in thinned(matrix).tolist()],
    )


def thinned(matrix: Tensor) -> Tensor:
    """At most LARGEST x LARGEST: the largest value of every cell; inf stays inf."""
    size = [min(n, LARGEST) for n in matrix.shape]
    rows = torch.tensor_split(matrix, size[0], 0)
    return torch.stack(
        [torch.stack([cell.max() for cell in torch.tensor_split(row, size[1], 1)]) for row in rows]
    )
