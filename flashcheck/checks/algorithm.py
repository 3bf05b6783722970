"""Tier C: the stored values are those of the algorithm that was declared."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from flashcheck.bounds.interval import Interval
from flashcheck.checks.judged import GRADIENTS, Judged
from flashcheck.checks.record import Location, Record, Status
from flashcheck.checks.registry import check, not_applicable


@check("forward.algorithm", faults="BPX")
def forward_algorithm(judged: Judged) -> Record:
    """O is what the declared tiling, order and rounding of P give, up to fp32-sized errors.

    The oracle predicts the value that every probability rounds to (bounds/THEORY.md section 6). Inside the
    worst-case bound and outside this one: not the algorithm that was declared.
    """
    name = "forward.algorithm"
    centred = judged.bound.out.centred
    if centred is None:
        return not_applicable(name, "the declaration does not determine the roundings of P")
    live = (~judged.empty_rows).unsqueeze(-1).expand_as(judged.result.out)
    return algorithm_record(name, judged, {"O": (judged.result.out, centred, live)})


@check("backward.algorithm", faults="PX")
def backward_algorithm(judged: Judged) -> Record:
    """dQ, dK, dV are what the declared roundings of P and dS give, up to fp32-sized errors.

    P is recomputed from the stored log-sum-exp, so no tiling need be known (THEORY.md section 6).
    """
    name = "backward.algorithm"
    if judged.kernel.backward is None:
        return not_applicable(name, "no backward is declared")
    if not judged.backward_defined:
        return not_applicable(name, "the exact forward is not finite")
    tensors = {}
    for tensor, bound in judged.backward_bound.tensors.items():
        if bound.centred is not None:
            got = judged.gradients[tensor]
            everything = torch.ones(got.shape, dtype=torch.bool)
            tensors[GRADIENTS[tensor]] = (got, bound.centred, everything)
    return algorithm_record(name, judged, tensors)


def algorithm_record(
    name: str, judged: Judged, tensors: dict[str, tuple[Tensor, Interval, Tensor]]
) -> Record:
    """Pass, or fail at the worst element of any tensor: name -> (kernel's, centred interval, judged)."""
    worst: Location | None = None
    outside = 0
    for tensor, (got, centred, live) in tensors.items():
        everything = bool(live.all())
        if not live.numel() or not (everything or bool(live.any())):
            continue
        margin = centred.margin(got)
        margin = margin if everything else torch.where(live, margin, 0.0)
        flat = int(margin.argmax())
        largest = float(margin.flatten()[flat])
        outside += int((margin > 1).sum()) if largest > 1 else 0
        if worst is None or largest > worst.margin:
            index = tuple(int(i) for i in np.unravel_index(flat, margin.shape))
            worst = Location(
                tensor,
                index,
                float(got[index]),
                float(centred.exact[index]),
                centred.bound_at(index),
                largest,
            )
    if worst is None:
        return not_applicable(name, "nothing to judge")
    line = judged.problem.describe()
    if worst.margin <= 1:
        return Record(name, Status.PASS, margin=worst.margin, where=worst, problem=line)
    message = f"{worst.tensor} is not what the declared algorithm gives"
    evidence = (
        f"{outside:,} elements differ from every value that the declared tiling and roundings can give",
        "tile size, visiting order, the format of P or dS, or where they are rounded is not as declared",
    )
    return Record(name, Status.FAIL, message, worst.margin, worst, evidence, line)
