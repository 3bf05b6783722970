"""Guesses the class of a fault; each guess is proved by a second experiment before it is told.

The experiment: the oracle and the bound are run on the problem that a kernel with the suspected
mistake would solve, and the output must lie within *that* bound everywhere.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import Tensor

from flashcheck.bounds.forward import forward_bound
from flashcheck.bounds.interval import Interval
from flashcheck.checks.diagnose_backward import diagnose_gradients
from flashcheck.checks.fitted import fitted_scale
from flashcheck.checks.judged import Judged
from flashcheck.checks.measure import measure
from flashcheck.checks.rms import RmsTally
from flashcheck.checks.suspects import Suspect, suspects
from flashcheck.errors import ArgumentError
from flashcheck.formats import BF16, E4M3, E5M2, FP16, half_ulp
from flashcheck.oracle import fp64

MOST_GUESSES = 3

FEWEST_FITTED = 8
FEWEST_FITTED_ROWS = 3
"""Wrong elements of O, or rows of LSE, from which a fitted number is told: it fits fewer by chance."""


def diagnose(judged: Judged) -> tuple[str, ...]:
    """Explanations that the kernel's output fits, likeliest first; empty where none does."""
    return tuple(fault_classes(judged).values())[:MOST_GUESSES]


def fault_classes(judged: Judged) -> dict[str, str]:
    """Class of fault -> explanation that the kernel's output fits; likeliest first, one of each class."""
    return forward_classes(judged) or backward_classes(judged)


def forward_classes(judged: Judged) -> dict[str, str]:
    """The same of O, or where O is right, of LSE."""
    measured = judged.measured
    if measured["O"].over:
        low = _finite_start(judged)
        found = ({"finite start": low} if low else {}) | _suspected(judged)
        if found:
            return found
        if zero := _zero_rows(judged):
            return {"zero rows": zero[0]}
        narrow = _narrower(judged)
        return {"narrow format": narrow[0]} if narrow else {}
    if "LSE" in measured and measured["LSE"].over:
        return _rules_of_lse(judged) | _suspected_of_lse(judged)
    return {}


def backward_classes(judged: Judged) -> dict[str, str]:
    """The same of the gradients that the backward makes of the oracle's O and LSE."""
    if judged.kernel.backward is None or not judged.backward_defined or not judged.differentiates():
        return {}
    return diagnose_gradients(judged)


def _suspected(judged: Judged) -> dict[str, str]:
    found: dict[str, str] = {}
    for suspect in suspects(judged.problem, judged.exact):
        if suspect.kind not in found and _fits(judged, suspect):
            found[suspect.kind] = suspect.text
        if len(found) >= MOST_GUESSES:
            return found
    if "scale" not in found and judged.measured["O"].over >= FEWEST_FITTED:
        other = fitted_scale(judged)
        if other is not None and _fits(judged, other):
            found["scale"] = other.text
    return found


def _rules_of_lse(judged: Judged) -> dict[str, str]:
    return {text.partition(" (")[0]: text for text in _log_sum_exp(judged)}


def _suspected_of_lse(judged: Judged) -> dict[str, str]:
    """Where LSE alone is wrong, as when one key outweighs all others: suspects whose LSE it is."""
    assert judged.result.lse is not None
    got = judged.result.lse.double()
    found: dict[str, str] = {}
    fitted = fitted_scale(judged) if judged.measured["LSE"].over >= FEWEST_FITTED_ROWS else None
    for suspect in (*suspects(judged.problem, judged.exact), *([fitted] if fitted else [])):
        if suspect.kind in found or suspect.row_factor is not None:
            continue
        try:
            exact = fp64.forward(suspect.problem)
            if not torch.allclose(exact.lse, got, rtol=1e-2, atol=1e-2, equal_nan=True):
                continue  # far off: no need of the bound, which is most of the work
            arithmetic = judged.kernel.arithmetic(suspect.problem)
            bound = forward_bound(suspect.problem, exact, arithmetic, judged.rules.machine).lse.interval
        except (ArgumentError, RuntimeError):
            continue
        if bool((bound.accepts(got) | judged.empty_rows).all()):
            found[suspect.kind] = suspect.text
    return found


def filled_rows(judged: Judged) -> dict[str, str]:
    """The same where rows that see no key are not zero: a suspect sees keys there, and fits everywhere."""
    found: dict[str, str] = {}
    got = judged.result.out.double()
    for suspect in suspects(judged.problem, judged.exact):
        if suspect.kind in found or suspect.row_factor is not None:
            continue
        try:
            exact = fp64.forward(suspect.problem)
            seen = exact.visible.any(-1, keepdim=True)
            if not bool((seen.squeeze(-1) & judged.empty_rows).any()):
                continue
            arithmetic = judged.kernel.arithmetic(suspect.problem)
            bound = forward_bound(suspect.problem, exact, arithmetic, judged.rules.machine).out.interval
        except (ArgumentError, RuntimeError):
            continue
        if bool(torch.where(seen, bound.accepts(got), got == 0).all()):
            found[suspect.kind] = suspect.text
    return found


def allowed_classes(judged: Judged, kinds: Iterable[str]) -> dict[str, str]:
    """Which of these classes O and LSE do not contradict: they lie within the bound of a suspect of each.

    Weaker than a diagnosis: a bound that is wide, as at subnormal values, allows the right O too.
    """
    wanted = tuple(kinds)
    found: dict[str, str] = {}
    if not wanted:
        return found
    fitted = fitted_scale(judged) if "scale" in wanted else None
    for s in (*suspects(judged.problem, judged.exact), *([fitted] if fitted else [])):
        if s.kind in wanted and s.kind not in found and _fits(judged, s, closer=False):
            found[s.kind] = s.text
    if "LSE" in judged.measured and not judged.measured["O"].over:
        found |= {kind: text for kind, text in _rules_of_lse(judged).items() if kind in wanted}
    if "narrow format" in wanted and judged.measured["O"].over and (narrow := _narrower(judged)):
        found["narrow format"] = narrow[0]
    return {kind: found[kind] for kind in wanted if kind in found}


def _fits(judged: Judged, suspect: Suspect, closer: bool = True) -> bool:
    try:
        exact = fp64.forward(suspect.problem)
        live = exact.visible.any(-1, keepdim=True)
        # Closeness first: it costs nothing, the bound is most of the work, and few suspects come close.
        if closer and not _explains(judged, suspect, exact.out):
            return False
        arithmetic = judged.kernel.arithmetic(suspect.problem)
        bounds = forward_bound(suspect.problem, exact, arithmetic, judged.rules.machine)
    except (ArgumentError, RuntimeError):
        return False
    got, bound = judged.result.out.double(), bounds.out.interval
    # A row that the suspect shows no key is 0 where the kernel knows such rows, anything where it does not.
    seen = live.squeeze(-1)
    live = live | ((got != 0) & judged.kernel.capabilities.empty_rows)
    if suspect.row_factor is None:
        lse = judged.result.lse
        if not closer and lse is not None and not bool((bounds.lse.interval.accepts(lse) | ~seen).all()):
            return False
        return bool((bound.accepts(got) | ~live).all())
    factor = suspect.row_factor.unsqueeze(-1)
    centre, error = factor * bound.exact, factor * bound.error
    allowed = 2 * error + half_ulp(centre.abs() + error, bound.fmt)
    return bool((((got - centre).abs() <= allowed) | ~live).all())


def _explains(judged: Judged, suspect: Suspect, value: Tensor) -> bool:
    """Where the kernel is wrong, the suspect is ten times closer: a bound that accepts all proves nothing."""
    got = judged.result.out.double()
    if suspect.row_factor is not None:
        value = suspect.row_factor.unsqueeze(-1) * value
    wrong = (judged.measured["O"].margin > 1) & torch.isfinite(got)
    if not bool(wrong.any()):
        return False
    before, after = (got - judged.exact.out)[wrong], (got - value)[wrong]
    return float(after.square().sum()) < 0.01 * float(before.square().sum())


def _zeroed(judged: Judged) -> Tensor:
    """Boolean (B, H, Nq): rows that are zero, and wrong."""
    got = judged.result.out.double()
    return (got == 0).all(-1) & (judged.measured["O"].margin > 1).any(-1)


def _finite_start(judged: Judged) -> str:
    """Zero rows are exactly those with the lowest logits, and these are low indeed."""
    zero, top = _zeroed(judged), judged.exact.row_max
    others = top[(judged.result.out != 0).any(-1) & ~judged.empty_rows]
    if not bool(zero.any()):
        return ""
    highest = float(top[zero].max())
    if highest > -80 or (others.numel() and float(others.min()) <= highest):
        return ""
    rows = f"{int(zero.sum())} rows whose logits all lie below {highest:.3g}"
    return f"O is zero in {rows}: the running maximum starts at a finite number"


def _zero_rows(judged: Judged) -> tuple[str, ...]:
    zero = _zeroed(judged)
    if not bool(zero.any()):
        return ()
    if bool((zero | judged.empty_rows).all()):
        return ("O is zero everywhere",)
    rows = sorted(set(zero.nonzero()[:, 2].tolist()))
    return (f"O is zero in {int(zero.sum())} rows that see keys (first: row {rows[0]})",)


def _narrower(judged: Judged) -> tuple[str, ...]:
    """Arithmetic other than declared that explains the errors in size: worst case and rms."""
    declared, machine = judged.rules.arithmetic, judged.rules.machine
    trials = [
        (f"P is rounded into {fmt}", replace(declared, probability_format=fmt), machine)
        for fmt in (FP16, BF16, E4M3, E5M2)
        if fmt.precision < declared.probability_format.precision
    ]
    for fmt in (FP16, BF16):
        narrow = replace(machine.vector, precision=fmt.precision)
        units = {name: replace(unit, precision=fmt.precision) for name, unit in machine.accumulators.items()}
        trials.append(
            (f"sums are accumulated in {fmt}", declared, replace(machine, vector=narrow, accumulators=units))
        )
    for text, arithmetic, other in trials:
        bound = forward_bound(judged.problem, judged.exact, arithmetic, other).out
        measured = measure("O", judged.result.out, bound, ~judged.empty_rows)
        tally = RmsTally()
        tally.add(measured)
        if not measured.over and tally.ratio is not None and 0.8 < tally.ratio < 1.25:
            return (f"{text} (errors fit that arithmetic, measured / predicted rms {tally.ratio:.2f})",)
    return ()


def _log_sum_exp(judged: Judged) -> tuple[str, ...]:
    assert judged.result.lse is not None
    got, exact = judged.result.lse.double(), judged.exact
    interval = judged.bound.lse.interval
    live = ~judged.empty_rows
    log_sum = torch.log(torch.where(live, exact.row_sum, 1.0))
    rules: dict[str, Tensor] = {
        "LSE is in base 2 (larger by a factor 1/ln 2)": interval.exact / math.log(2.0),
        "LSE is scaled by ln 2 although it is natural already": interval.exact * math.log(2.0),
        "the maximum is left out of LSE: it is log(row sum)": log_sum,
        "LSE holds the row maximum alone": exact.row_max,
        "LSE holds the sum, not its logarithm": torch.exp(interval.exact),
        "LSE has the wrong sign": -interval.exact,
        "LSE is zero": torch.zeros_like(got),
    }
    fitting = (text for text, value in rules.items() if _close(got, value, interval, live))
    return tuple(fitting)[:MOST_GUESSES]


def _close(got: Tensor, value: Tensor, interval: Interval, live: Tensor) -> bool:
    """Within the bound's relative size of ``value``, with room for one more fp32 operation."""
    room = 2 * interval.error + 2.0**-21 * (value.abs() + 1)
    return bool(((got - value).abs() <= room)[live & torch.isfinite(value)].all())
