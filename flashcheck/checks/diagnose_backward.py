"""Guesses the class of a fault of the backward; told only where a second computation confirms it.

The experiment: the gradients that a backward with the suspected mistake computes, exactly, from the same
stored O and LSE; the kernel's must agree with them a hundred times better than with the right ones.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from itertools import chain

import torch
from torch import Tensor

from flashcheck.checks.judged import GRADIENTS, Judged
from flashcheck.checks.suspects import suspects
from flashcheck.errors import ArgumentError
from flashcheck.oracle import fp64

MOST_GUESSES = 3
TILES = (16, 32, 64, 128)

Gradients = dict[str, Tensor]


Guesses = Iterator[tuple[str, str]]
"""Pairs of a class of fault and the explanation, with the numbers of this problem."""

CLOSE = 0.01
ALLOWED = 0.25
"""Share of the sum of squared errors that an explanation may leave: as a diagnosis, and to be possible."""


def diagnose_gradients(judged: Judged) -> dict[str, str]:
    """Class of fault -> explanation that the gradients fit, likeliest first; empty where none does."""
    wrong = _wrong(judged)
    if not wrong:
        return {}
    found = [*_factors(judged, wrong), *_mistakes(judged, wrong, CLOSE)]
    if not found:
        others = list(_other_problems(judged, wrong, CLOSE))
        found = [*others[:1], *_zeros(judged, wrong)]
    return dict(list(dict(reversed(found)).items())[::-1][:MOST_GUESSES])


def allowed_gradients(judged: Judged, kinds: Iterable[str]) -> dict[str, str]:
    """Which of these classes the gradients do not contradict: they come nearer with them."""
    wanted, wrong = set(kinds), _wrong(judged)
    if not wanted or not wrong:
        return {}
    found = chain(
        _factors(judged, wrong), _mistakes(judged, wrong, ALLOWED), _other_problems(judged, wrong, ALLOWED)
    )
    return {kind: text for kind, text in found if kind in wanted}


def _wrong(judged: Judged) -> list[str]:
    return [n for n, t in GRADIENTS.items() if t in judged.measured_gradients and _over(judged, n)]


def _over(judged: Judged, name: str) -> bool:
    return judged.measured_gradients[GRADIENTS[name]].over > 0


def _exact(judged: Judged, name: str) -> Tensor:
    exact: Tensor = getattr(judged.exact_gradients, name)
    return exact


def _explains(judged: Judged, name: str, value: Tensor, share: float = CLOSE) -> bool:
    """``value`` leaves no more than this share of the sum of squared errors."""
    got = judged.gradients[name].double()
    some = torch.isfinite(got) & torch.isfinite(value)
    before, after = (got - _exact(judged, name))[some], (got - value)[some]
    if not bool(some.any()):
        return False
    largest = float(before.abs().max()) or 1.0  # squares of large errors would overflow
    return float((after / largest).square().sum()) < share * float((before / largest).square().sum())


def _factors(judged: Judged, wrong: list[str]) -> Guesses:
    """Gradients that are a constant times the right ones."""
    p = judged.problem
    scale = p.effective_scale
    for name in wrong:
        got, exact = judged.gradients[name].double(), _exact(judged, name)
        some = torch.isfinite(got) & torch.isfinite(exact)  # too large a factor may overflow
        largest = float(exact[some].abs().max()) if bool(some.any()) else 0.0
        if largest == 0:
            continue
        shape, seen = exact[some] / largest, got[some] / largest
        factor = float((seen * shape).sum() / shape.square().sum())
        if abs(factor - 1) < 1e-3 or not _explains(judged, name, factor * exact):
            continue
        names = {
            "the scale is applied twice": scale,
            "the scale is not applied": 1 / scale if scale else math.inf,
            "the sign is wrong": -1.0,
            "it is zero": 0.0,
            "log2(e) is applied once too often": 1 / math.log(2.0),
            "ln 2 is applied once too often": math.log(2.0),
            "it is averaged over the query heads of a group, not summed": 1 / p.group,
        }
        if name not in ("dq", "dk"):  # no scale enters the others
            names = {text: c for text, c in names.items() if "scale" not in text}
        close = [text for text, c in names.items() if abs(c - factor) <= 0.01 * max(abs(c), 0.01)]
        told = close[0] if close else "a constant factor is wrong"
        yield f"{GRADIENTS[name]}: {told}", f"{GRADIENTS[name]} is {factor:.4g} times the right one: {told}"


def _mistakes(judged: Judged, wrong: list[str], share: float) -> Guesses:
    """Mistakes of the backward itself, recomputed from the oracle's P, dP and delta."""
    for text, made in _variants(judged):
        judging = [n for n in wrong if n in made]
        if judging and all(_explains(judged, n, made[n], share) for n in judging):
            yield text, text


def _variants(judged: Judged) -> Iterator[tuple[str, Gradients]]:
    p, exact = judged.gradient_problem, judged.exact_gradients
    assert p.dout is not None
    weights, dp, ds = exact.probabilities, exact.grad_probabilities, exact.grad_scores
    slope: Tensor | float = 1.0
    if p.softcap is not None:
        slope = torch.cosh(judged.exact.products / p.softcap) ** -2.0
        yield "the softcap's derivative 1 - tanh^2 is left out", _products(judged, ds, weights)
    yield "rowsum(dO * O) is not subtracted", _products(judged, weights * dp * slope, weights)
    lse = judged.stored[1].double().nan_to_num(0.0, 0.0, 0.0).unsqueeze(-1)
    for text, factor in (
        ("in base 2", math.log(2.0)),
        ("natural, and converted once more", 1 / math.log(2.0)),
    ):
        other = weights * torch.exp(lse - factor * lse)
        made = _products(judged, other * (dp - exact.delta.unsqueeze(-1)) * slope, other)
        yield f"the stored LSE is read as if it were {text}", made
    if p.dlse is not None:
        dropped = weights * (dp - (exact.delta + p.dlse.double()).unsqueeze(-1)) * slope
        yield "the gradient of the LSE is dropped", _products(judged, dropped, weights)
    if p.group > 1:
        for text, head in (("last", -1), ("first", 0)):
            only = _products(judged, ds * slope, weights, member=head)
            yield f"dK and dV hold the {text} query head of every group, not the sum", only


def _products(judged: Judged, dx: Tensor, weights: Tensor, member: int | None = None) -> Gradients:
    """dQ, dK, dV from dS (after the cap's derivative) and P; ``member``: one query head of a group alone."""
    p = judged.gradient_problem
    assert p.dout is not None
    q, dout = p.q.double(), p.dout.double()
    k = p.k.double().repeat_interleave(p.group, 1)
    dx = torch.where(judged.exact.visible, dx, 0.0)
    dk, dv = (dx.mT @ q) * p.effective_scale, (weights.mT @ dout) * p.v_descale
    grouped = [torch.unflatten(x, 1, (p.num_kv_heads, p.group)) for x in (dk, dv)]
    dk, dv = (x.sum(2) if member is None else x[:, :, member] for x in grouped)
    return {"dq": (dx @ k) * p.effective_scale, "dk": dk, "dv": dv}


def _other_problems(judged: Judged, wrong: list[str], share: float) -> Guesses:
    """Mistakes of the forward's kind, made by the backward: another mask, other heads, an ignored option."""
    for suspect in suspects(judged.gradient_problem, judged.exact):
        try:
            made = fp64.backward(suspect.problem, *judged.stored)
        except (ArgumentError, RuntimeError):
            continue
        values = {n: getattr(made, n) for n in wrong}
        fitting = [n for n, x in values.items() if x is not None and x.shape == _exact(judged, n).shape]
        if fitting and all(_explains(judged, n, values[n], share) for n in fitting):
            yield f"in the backward: {suspect.kind}", f"in the backward, {suspect.text}"


def _zeros(judged: Judged, wrong: list[str]) -> Guesses:
    """Rows that were never computed."""
    for name in wrong:
        got = judged.gradients[name].double()
        if got.ndim != 4:
            continue
        zero = (got == 0).all(-1).all(1).all(0) & (_exact(judged, name) != 0).any(-1).any(1).any(0)
        rows = zero.nonzero().flatten().tolist()
        if not rows:
            continue
        tile = next((t for t in TILES if rows == list(range(got.shape[2] // t * t, got.shape[2]))), None)
        tail = f", the ragged last tile of {tile}" if tile else ""
        text = f"{GRADIENTS[name]} is zero in {len(rows)} rows (first: {rows[0]}){tail}"
        yield f"{GRADIENTS[name]} is zero in some rows", text
