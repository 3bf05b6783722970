"""Guesses the class of a fault of the backward; told only where a second computation confirms it.

The experiment: the gradients that a backward with the suspected mistake computes, exactly, from the same
stored O and LSE; the kernel's must agree with them a hundred times better than with the right ones.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from flashcheck.checks.judged import GRADIENTS, Judged
from flashcheck.checks.suspects import suspects
from flashcheck.errors import ArgumentError
from flashcheck.oracle import fp64

MOST_GUESSES = 3
TILES = (16, 32, 64, 128)

Gradients = dict[str, Tensor]


def diagnose_gradients(judged: Judged) -> tuple[str, ...]:
    """Explanations that the gradients fit, likeliest first; empty where none does."""
    wrong = [n for n, t in GRADIENTS.items() if t in judged.measured_gradients and _over(judged, n)]
    if not wrong:
        return ()
    found = [*_factors(judged, wrong), *_mistakes(judged, wrong)]
    if not found:
        found = [*_other_problems(judged, wrong), *_zeros(judged, wrong)]
    return tuple(dict.fromkeys(found))[:MOST_GUESSES]


def _over(judged: Judged, name: str) -> bool:
    return judged.measured_gradients[GRADIENTS[name]].over > 0


def _exact(judged: Judged, name: str) -> Tensor:
    exact: Tensor = getattr(judged.exact_gradients, name)
    return exact


def _explains(judged: Judged, name: str, value: Tensor) -> bool:
    """``value`` is ten times closer to the kernel's than the right one, in the root of the sum of squares."""
    got = judged.gradients[name].double()
    some = torch.isfinite(got) & torch.isfinite(value)
    before, after = (got - _exact(judged, name))[some], (got - value)[some]
    return bool(some.any()) and float(after.square().sum()) < 0.01 * float(before.square().sum())


def _factors(judged: Judged, wrong: list[str]) -> Iterator[str]:
    """Gradients that are a constant times the right ones."""
    p = judged.problem
    scale = p.effective_scale
    for name in wrong:
        got, exact = judged.gradients[name].double(), _exact(judged, name)
        square = float(exact.square().sum())
        if not math.isfinite(square) or square == 0 or not bool(torch.isfinite(got).all()):
            continue
        factor = float((got * exact).sum()) / square
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
        close = [text for text, c in names.items() if abs(c - factor) <= 0.01 * max(abs(c), 0.01)]
        told = close[0] if close else "a constant factor is wrong"
        yield f"{GRADIENTS[name]} is {factor:.4g} times the right one: {told}"


def _mistakes(judged: Judged, wrong: list[str]) -> Iterator[str]:
    """Mistakes of the backward itself, recomputed from the oracle's P, dP and delta."""
    for text, made in _variants(judged):
        judging = [n for n in wrong if n in made]
        if judging and all(_explains(judged, n, made[n]) for n in judging):
            yield text


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


def _other_problems(judged: Judged, wrong: list[str]) -> Iterator[str]:
    """Mistakes of the forward's kind, made by the backward: another mask, other heads, an ignored option."""
    for suspect in suspects(judged.gradient_problem, judged.exact):
        try:
            made = fp64.backward(suspect.problem, *judged.stored)
        except (ArgumentError, RuntimeError):
            continue
        values = {n: getattr(made, n) for n in wrong}
        fitting = [n for n, x in values.items() if x is not None and x.shape == _exact(judged, n).shape]
        if fitting and all(_explains(judged, n, values[n]) for n in fitting):
            yield f"in the backward, {suspect.text}"
            return


def _zeros(judged: Judged, wrong: list[str]) -> Iterator[str]:
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
        yield f"{GRADIENTS[name]} is zero in {len(rows)} rows (first: {rows[0]}){tail}"
