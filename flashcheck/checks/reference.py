"""The oracle's answer to a judged problem, from the lowest rung that a verdict can rest on.

Float64 first. A row climbs where float64's own proved error exceeds 1/64 of what the kernel is allowed, and
1/64 of the way from the exact value to the end of what rounds to the kernel's; or where the verdict on an
element hinges on it: the kernel's value is accepted at one end of that error and rejected at the other.
``oracle.screen`` passes ordinary rows at the cost of a few norms; ``oracle.own_error`` looks at the others
before any climbs. Gradients climb no further than until no verdict hinges any more: the last rung costs
seconds.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from flashcheck.bounds.interval import Interval
from flashcheck.bounds.result import BackwardBound, ForwardBound, TensorBound
from flashcheck.formats import Format, round_inside, round_nearest
from flashcheck.kernel import ForwardResult
from flashcheck.oracle import fp64, ladder, ladder_backward, own_error, screen
from flashcheck.oracle.ladder import FRACTION, RUNGS, AllowedForward, demand
from flashcheck.oracle.quantities import BackwardQuantities, ForwardQuantities
from flashcheck.oracle.unit import FP64
from flashcheck.problem import Problem

UNRESOLVED = "unresolved"
"""Counted next to the rungs: rows whose need not even the last rung can prove to be met."""


@dataclass(frozen=True, slots=True)
class ForwardReference:
    """Forward quantities; rows: rung -> rows served; climbed: some row left float64."""

    quantities: ForwardQuantities
    rows: Counter[str]
    climbed: bool


SHARPER = 2.0**-30
"""A verdict that hinges on an error asks for this much of it, and is looked at again."""

_ROUNDS = 6
"""More often than the ladder has levels nothing needs to be looked at."""


@dataclass(frozen=True, slots=True)
class BackwardReference:
    """Gradients and what their bounds need, and the bound made of them; rows as in ``ForwardReference``."""

    quantities: BackwardQuantities
    bound: BackwardBound
    rows: Counter[str]


def forward_reference(
    problem: Problem, low: ForwardQuantities, bound: ForwardBound, result: ForwardResult | None
) -> ForwardReference:
    """Forward quantities good enough for ``bound``.

    Args:
        low: float64's, and bound: the bound made of them.
        result: the kernel's answer, None where it has none.
    """
    errors, total = screen.forward_error(problem, low), low.lse.numel()
    asked, out, lse = _asked(low, bound, result, errors)
    rows = asked.any(0).any(0).nonzero().squeeze(-1)
    if len(rows):  # the screen is coarse: float64's own proof settles most of what it leaves open
        proved = own_error.forward_error(problem, _rows_of(low, rows), FP64, rows)
        for coarse, sharp in zip(errors, (proved.out, proved.lse), strict=True):
            coarse[:, :, rows] = torch.minimum(coarse[:, :, rows], sharp)
        asked, out, lse = _asked(low, bound, result, errors)
        rows = asked.any(0).any(0).nonzero().squeeze(-1)
    if not len(rows):
        return ForwardReference(low, Counter({RUNGS[0]: total}), climbed=False)
    wanted = AllowedForward(
        torch.where(asked.unsqueeze(-1), out, torch.inf)[:, :, rows],
        torch.where(asked, lse, torch.inf)[:, :, rows],
    )
    served = ladder.forward_rows(problem, wanted, rows)
    counts = _counted(served.rung, total)
    if unresolved := int((~served.resolved).sum()):
        counts[UNRESOLVED] = unresolved
    if not bool((served.rung > 0).any()):
        return ForwardReference(low, counts, climbed=False)
    place = (served.rung > 0).nonzero().unbind(-1)
    into = (place[0], place[1], rows[place[2]])
    replaced = {}
    for name in ForwardQuantities.__slots__:
        whole = getattr(low, name).clone()
        whole[into] = getattr(served.quantities, name)[place]
        replaced[name] = whole
    return ForwardReference(ForwardQuantities(**replaced), counts, climbed=True)


def _asked(
    low: ForwardQuantities, bound: ForwardBound, result: ForwardResult | None, errors: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """Rows (B, H, Nq) for which float64, off by ``errors`` of O and LSE, will not do; what these may err."""
    got = (None, None) if result is None else (result.out, result.lse)
    out, lse = (_needed(b, e, x) for b, e, x in zip((bound.out, bound.lse), errors, got, strict=True))
    asked = _falls_short(errors[0], out, low.out).any(-1) | _falls_short(errors[1], lse, low.lse)
    return asked, out, lse


def _falls_short(error: Tensor, allowed: Tensor, value: Tensor) -> Tensor:
    """``error`` is more than is good enough for ``allowed``."""
    short = ~(error <= allowed * FRACTION)
    return short & (error > demand(allowed, value)) if bool(short.any()) else short


def _rows_of(whole: ForwardQuantities, rows: Tensor) -> ForwardQuantities:
    return ForwardQuantities(**{name: getattr(whole, name)[:, :, rows] for name in whole.__slots__})


def backward_reference(
    problem: Problem,
    forward: ForwardQuantities,
    low: BackwardQuantities,
    bound_of: Callable[[BackwardQuantities], BackwardBound],
    gradients: Mapping[str, Tensor],
    stored: tuple[Tensor, Tensor] | None,
) -> BackwardReference:
    """Gradients good enough for their bound.

    Args:
        forward: the served forward quantities; low: float64's gradients.
        bound_of: the bound made of gradients.
        gradients: the kernel's, by name; empty where it has none.
        stored: O and LSE on which the gradients are conditional, None where they are from scratch.
    """
    rows = forward.lse.numel()
    out, lse = (None, None) if stored is None else stored
    quantities, bound = low, bound_of(low)
    counts = Counter({RUNGS[0]: rows})
    errors = screen.backward_error(problem, forward, low, out=out, lse=lse)
    names = bound.tensors.keys() & errors.keys()

    def allowed_of() -> dict[str, Tensor]:
        return {name: _allowed(bound.tensors[name], errors[name], gradients.get(name)) for name in names}

    limits = allowed_of()

    def enough() -> bool:
        return not any(
            bool(_falls_short(errors[name], limit, getattr(low, name)).any())
            for name, limit in limits.items()
        )

    def doubts() -> dict[str, Tensor]:
        found = {
            name: _doubtful(bound.tensors[name], gradients.get(name), errors[name], getattr(quantities, name))
            for name in limits
        }
        return {name: x for name, x in found.items() if bool(x.any())}

    sufficient, doubtful = enough(), doubts()
    if low.dq.numel() and not (sufficient and not doubtful):
        # The screen is coarse: float64's own proof settles most of what it leaves open.
        proved = own_error.backward_error(problem, fp64.forward(problem), low, FP64, out=out, lse=lse)
        errors = {name: torch.minimum(x, getattr(proved, name)) for name, x in errors.items()}
        limits = allowed_of()
        sufficient, doubtful = enough(), doubts()
    for _ in range(_ROUNDS if low.dq.numel() else 0):
        if sufficient and not doubtful:
            break
        allowed = ladder_backward.like(problem, torch.inf)
        for name, limit in limits.items():
            if name in doubtful:
                limits[name] = torch.where(doubtful[name], SHARPER * errors[name], limit)
            getattr(allowed, name).copy_(limits[name])
        served_quantities, served = ladder_backward.backward_quantities(problem, allowed, out, lse)
        if bool((served.rung > 0).any()):
            quantities, bound = served_quantities, bound_of(served_quantities)
        counts = _counted(served.rung, rows)
        if not served.resolved:
            counts[UNRESOLVED] = int((served.rung == len(RUNGS) - 1).sum())
            break
        errors, sufficient = dict(served.errors.named()), True
        doubtful = doubts()
    return BackwardReference(quantities, bound, counts)


def _doubtful(bound: TensorBound, got: Tensor | None, error: Tensor, value: Tensor) -> Tensor:
    """Elements whose verdict hinges on the oracle's error, where float64 can tell a smaller one."""
    if got is None:
        return torch.zeros_like(value, dtype=torch.bool)
    hinging = None
    for interval in _intervals(bound):
        more = hinges(interval, got, error)
        hinging = more if hinging is None else hinging | more
    assert hinging is not None
    if not bool(hinging.any()):
        return hinging
    return hinging & (error > 4 * demand(torch.zeros_like(error), value))


def _counted(rung: Tensor, total: int) -> Counter[str]:
    counts = Counter({name: int((rung == n).sum()) for n, name in enumerate(RUNGS) if n})
    counts[RUNGS[0]] = total - sum(counts.values())
    return +counts


def _intervals(bound: TensorBound) -> list[Interval]:
    return [bound.interval] if bound.centred is None else [bound.interval, bound.centred]


def _allowed(bound: TensorBound, error: Tensor, got: Tensor | None) -> Tensor:
    """The smaller of both tiers' limits. inf where the oracle, off by ``error``, says for certain that the
    kernel's value is the right one: the error is at most 1/64 of the way to the end of what rounds to it."""
    limits = []
    for interval in _intervals(bound):
        limit = interval.error
        need = None if got is None else interval.needs(got)[1]
        if need is not None and bool((error > limit * FRACTION).any()):
            limit = torch.where(need <= error * (-1 / FRACTION), torch.inf, limit)
        limits.append(limit)
    return limits[0] if len(limits) == 1 else torch.minimum(*limits)


def _needed(bound: TensorBound, error: Tensor, got: Tensor | None) -> Tensor:
    """What the oracle may err by: what both tiers allow, and 0 where the verdict hinges on it."""
    needed = _allowed(bound, error, got)
    if got is None:
        return needed
    for interval in _intervals(bound):
        hinging = hinges(interval, got, error)
        needed = torch.where(hinging, 0.0, needed) if bool(hinging.any()) else needed
    return needed


def hinges(interval: Interval, got: Tensor, error: Tensor) -> Tensor:
    """True where moving ``interval.exact`` or its limit by ``error`` changes whether ``got`` is accepted."""
    wide, need = interval.needs(got)
    if need is None or not (interval.inside and math.isfinite(float(error.sum()))):
        return _hinges(interval.exact, interval.error, wide, error, interval.fmt)
    # Accepted under a limit is what needs no more. With a limit of 0, what rounds to the exact value.
    hinging = need > (interval.error - error).clamp_(min=0.0)
    return hinging.logical_and_(need <= interval.error + error) if bool(hinging.any()) else hinging


def _hinges(exact: Tensor, limit: Tensor, got: Tensor, error: Tensor, fmt: Format) -> Tensor:
    judged = None
    if not math.isfinite(float((got - exact).abs_().add_(limit).add_(error).sum())):
        judged = torch.isfinite(got) & torch.isfinite(exact) & torch.isfinite(limit)
        error = torch.where(judged & torch.isfinite(error), error, 0.0)
        limit = torch.where(judged, limit, 0.0)

    def accepted(limit: Tensor) -> Tensor:
        lower, upper = exact - limit, exact + limit
        inside = float(upper.amax()) < fmt.max_finite and float(lower.amin()) > -fmt.max_finite
        rounded = round_inside if inside else round_nearest
        return (got >= rounded(lower, fmt)) & (got <= rounded(upper, fmt))

    doubtful = ~accepted((limit - error).clamp_(min=0.0))
    doubtful = doubtful if judged is None else doubtful & judged
    if not bool(doubtful.any()):
        return doubtful
    return doubtful & accepted(limit + error)
