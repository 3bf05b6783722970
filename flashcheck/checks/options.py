"""Options: each one that is set has an effect, and an illegal value raises."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import torch

from flashcheck.bounds.forward import forward_bound
from flashcheck.checks.accuracy import inaccurate
from flashcheck.checks.bits import first_difference
from flashcheck.checks.judged import Judged, KernelError, on_device
from flashcheck.checks.record import Record
from flashcheck.checks.registry import check, failed, not_applicable, passed
from flashcheck.errors import ArgumentError
from flashcheck.oracle import fp64
from flashcheck.problem import Problem


@check("option.effect", faults="CDKLSVX")
def option_effect(judged: Judged) -> Record:
    """Each option that the problem sets has its effect: the result is not that of the problem without it.

    Only options whose effect exceeds the bounds are judged: the oracle says which, so that an option at a
    value that changes nothing cannot pass for tested.
    """
    name = "option.effect"
    judging = effective_options(judged)
    if not judging:
        return not_applicable(name, "no option of the problem changes the answer by more than its bounds")
    ignored = [option for option, seen in judging.items() if not seen]
    if ignored and inaccurate(judged):
        return not_applicable(name, f"forward.bound rejects the problem itself ({', '.join(ignored)})")
    if ignored:
        return failed(name, judged, f"the result is the one without {', '.join(ignored)}")
    return passed(name, judged, ", ".join(judging))


def effective_options(judged: Judged) -> dict[str, bool]:
    """Option -> the kernel's result differs from the problem without it; only where the exact one does."""
    out: dict[str, bool] = {}
    for option, without in _without(judged.problem):
        try:
            exact = fp64.forward(without)
            bound = forward_bound(without, exact, judged.rules.arithmetic, judged.rules.machine)
        except (ArgumentError, RuntimeError):
            continue
        live = exact.visible.any(-1) & ~judged.empty_rows
        tensors = [(judged.result.out, judged.bound.out, bound.out, live.unsqueeze(-1))]
        if judged.result.lse is not None:
            tensors.append((judged.result.lse, judged.bound.lse, bound.lse, live))
        matters = accepted = False
        for got, own, other, rows in tensors:
            apart = (
                own.interval.exact - other.interval.exact
            ).abs() > own.interval.bound + other.interval.bound
            apart = apart & rows
            if not bool(apart.any()):
                continue
            matters = True
            # Where either may overflow, inf and NaN belong to both and tell nothing.
            fits = other.interval.accepts(got) & ~own.interval.accepts(got) & torch.isfinite(got.double())
            accepted = accepted or bool((fits & apart).any())
        if matters:
            out[option] = not accepted
    return out


def _without(problem: Problem) -> list[tuple[str, Problem]]:
    """The problem with one option less, for every option it sets."""
    out = []
    for option in problem.options():
        if option == "cu_seqlens":
            changes: dict[str, Any] = {"cu_seqlens_q": None, "cu_seqlens_k": None}
        else:
            changes = {option: None}
        out.append((option, problem.replaced(**changes)))
    return out


@check("option.illegal", faults="XL", reruns=0)
def option_illegal(judged: Judged) -> Record:
    """An illegal argument raises: shapes that do not fit, and illegal values of every declared option.

    Judged where the kernel declares that it rejects illegal arguments; calls raise before anything runs.
    """
    name = "option.illegal"
    capabilities = judged.kernel.capabilities
    if not capabilities.rejects_illegal:
        return not_applicable(name, "rejection of illegal arguments is not declared")
    p = judged.problem
    trials = [
        (text, changes) for text, option, changes in _illegal(p) if option in ("", *capabilities.options)
    ]
    accepted = []
    for text, changes in trials:
        try:
            judged.kernel.forward(on_device(_unchecked(p, changes), judged.device))
        except Exception:  # any exception is a refusal; which one, is the kernel's choice
            continue
        accepted.append(text)
    if accepted:
        return failed(name, judged, f"accepted without an error: {'; '.join(accepted)}")
    return passed(name, judged, f"{len(trials)} illegal calls")


def _illegal(p: Problem) -> list[tuple[str, str, dict[str, Any]]]:
    """(words, option or "", changed fields): each illegal by the contract."""
    heads, nq, nk = p.num_heads, p.num_queries, p.num_keys
    wide = torch.ones(1, 1, nq + 2, nk + 2, dtype=torch.bool)
    return [
        ("k with another head dim than q", "", {"k": torch.cat([p.k, p.k], -1)}),
        (
            "v with more keys than k",
            "",
            {"v": torch.cat([p.v, p.v[:, :, :1], p.v[:, :, :1]], 2)} if nk else {"q": p.q[0]},
        ),
        ("q with 3 dimensions", "", {"q": p.q[0]}),
        ("scale=nan", "scale", {"scale": float("nan")}),
        ("scale=inf", "scale", {"scale": float("inf")}),
        ("causal='diagonal'", "causal", {"causal": "diagonal"}),
        ("window=(-1, 0)", "window", {"window": (-1, 0)}),
        ("mask of another shape", "mask", {"mask": wide}),
        ("mask of integers", "mask", {"mask": torch.ones(1, 1, nq, nk, dtype=torch.int32)}),
        ("bias of another shape", "bias", {"bias": wide.float()}),
        ("alibi_slopes for other heads", "alibi_slopes", {"alibi_slopes": torch.ones(heads + 1)}),
        ("softcap=0", "softcap", {"softcap": 0.0}),
        ("softcap=-1", "softcap", {"softcap": -1.0}),
        ("sink for other heads", "sink", {"sink": torch.zeros(heads + 1)}),
        (
            "key_lengths for another batch",
            "key_lengths",
            {"key_lengths": torch.zeros(p.batch + 1, dtype=torch.int32)},
        ),
        (
            "cu_seqlens that decrease",
            "cu_seqlens",
            {"cu_seqlens_q": torch.tensor([0, nq + 1, nq]), "cu_seqlens_k": torch.tensor([0, nk + 1, nk])},
        ),
    ]


def _unchecked(problem: Problem, changes: dict[str, Any]) -> Problem:
    """A copy with illegal fields, which ``Problem`` itself would refuse."""
    made = copy.copy(problem)
    made.__dict__.pop("visibility", None)
    for field, value in changes.items():
        object.__setattr__(made, field, value)
    return made


@check("state.interleaved", faults="XN", reruns=4)
def state_interleaved(judged: Judged) -> Record:
    """Calls in between, with another causality, scalars and shapes, are right and change nothing after.

    A plan, a compiled call or a table that is kept without one of the arguments it depends on shows here.
    """
    name = "state.interleaved"
    first = judged.result
    for text, problem in _others(judged):
        other = Judged(judged.kernel, problem, str(judged.device))
        try:
            measured = other.measured
        except KernelError as error:
            return failed(name, judged, f"another call, with {text}: {error}")
        over = next((m.worst for m in measured.values() if m.over and m.worst is not None), None)
        if over is not None and not inaccurate(judged):
            return failed(name, judged, f"after another call, with {text}: {over.describe()}")
    again = judged.run()
    if not judged.kernel.capabilities.deterministic:
        return passed(name, judged, "calls in between are right")
    difference = first_difference(first, again)
    if difference:
        message = f"the same call gives other bits after calls with other arguments: {difference}"
        return failed(name, judged, message)
    return passed(name, judged)


def _others(judged: Judged) -> list[tuple[str, Problem]]:
    """Neighbouring calls that are declared: the same shapes causal or not, with other scalars, and fewer
    rows."""
    p, capabilities = judged.problem, judged.kernel.capabilities
    trials: list[tuple[str, dict[str, Any]]] = []
    if p.causal is not None:
        trials.append(("no causality", {"causal": None}))
    elif "causal" in capabilities.options:
        trials.append((f"causal={capabilities.causal[0]}", {"causal": capabilities.causal[0]}))
    scalars: dict[str, Any] = {}
    if "scale" in capabilities.options:
        # A power of two keeps every family inside the range that it was made for.
        scalars["scale"] = (p.effective_scale / (p.q_descale * p.k_descale)) / 2
    if p.softcap is not None:
        scalars["softcap"] = p.softcap * 1.5
    if p.window is not None:
        scalars["window"] = tuple(None if side is None else side + 1 for side in p.window)
    if scalars:
        trials.append((f"another {' and '.join(scalars)}", scalars))
    free = not {"causal", "window", "alibi_slopes", "cu_seqlens"} & set(p.options())
    if p.num_queries > 1 and free and capabilities.cross_lengths:
        rows = p.num_queries // 2
        cut = {
            n: x[:, :, :rows] for n in ("mask", "bias") if (x := getattr(p, n)) is not None and x.shape[2] > 1
        }
        shorter = {"q": p.q[:, :, :rows].contiguous(), "dout": None, "dlse": None, **cut}
        trials.append((f"{rows} queries", shorter))
    out = []
    for text, changes in trials:
        problem = replace(p, **changes)
        declared = capabilities.empty_rows or bool(problem.visible().any(-1).all())
        if capabilities.refuses(problem) is None and declared:
            out.append((text, problem))
    return out
