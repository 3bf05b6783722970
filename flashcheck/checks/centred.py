"""Accuracy against the interval around the predicted roundings."""

from __future__ import annotations

import torch

from flashcheck.bounds.interval import Interval
from flashcheck.checks.judged import Judged
from flashcheck.checks.record import Location, Record, Status
from flashcheck.checks.registry import check, not_applicable


@check("forward.centred")
def forward_centred_holds(judged: Judged) -> Record:
    """O is what the declared tiles, order and roundings of P give, up to fp32 errors.

    The declaration determines how each probability is rounded; the interval of bounds/THEORY.md
    section 4 has that prediction in its middle and is far narrower than the bound. A kernel may obey
    forward.bound and fail here: then it is not the algorithm that it declares. Applies where the
    declaration determines the roundings, and is left to forward.bound where that fails.
    """
    name = "forward.centred"
    interval = judged.bound.out.centred
    if interval is None:
        return not_applicable(name, "the declaration does not determine the roundings of P")
    if judged.measured["O"].over:
        return not_applicable(name, "O is outside its bound: forward.bound tells")
    got = judged.result.out.double()
    outside = ~interval.accepts(got) & ~judged.empty_rows.unsqueeze(-1)
    line = judged.problem.describe()
    if not bool(outside.any()):
        return Record(name, Status.PASS, problem=line)
    where = _first(judged, interval, got, outside)
    message = "O is inside its bound, but not what the declared tiles and roundings of P give"
    low, high = (float(end[where.index]).hex() for end in (interval.lower, interval.upper))
    evidence = (
        f"elements outside: {int(outside.sum()):,} of {outside.numel():,}",
        f"accepted there: {low} .. {high}",
    )
    return Record(name, Status.FAIL, message, where.margin, where, evidence, line)


def _first(judged: Judged, interval: Interval, got: torch.Tensor, outside: torch.Tensor) -> Location:
    margin = torch.where(outside, interval.margin(got), 0.0)
    index = tuple(int(i) for i in torch.unravel_index(margin.argmax(), margin.shape))
    exact = judged.bound.out.interval.exact
    bound = torch.maximum((interval.lower - exact).abs(), (interval.upper - exact).abs())
    got_there, exact_there, bound_there, margin_there = (float(x[index]) for x in (got, exact, bound, margin))
    return Location("O", index, got_there, exact_there, bound_there, margin_there)
