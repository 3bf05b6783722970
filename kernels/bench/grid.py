"""Forward and backward of every method on one problem of the grid, side by side."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kernels.bench.methods import FLEX, OURS, attention
from kernels.bench.problems import Size
from kernels.bench.timing import Run, alternating

# Two right methods differ by rounding; a wrong one by far more. Accuracy itself is the checker's to judge.
LARGEST_DIFFERENCE = 2e-2


def measure(
    size: Size, methods: Sequence[str], device: str, budget: float, reference: str, skip: dict[str, str]
) -> dict[str, Any]:
    """Milliseconds and TFLOP/s a method and pass, and each method's difference from ``reference``.

    Args:
        budget: milliseconds of timing a method and pass.
        skip: methods not to run, and why. A method that fails is recorded with its error.
    """
    q, k, v, dout = size.tensors(device, 4)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    forwards: dict[str, Run] = {}
    backwards: dict[str, Run] = {}
    results: dict[str, list[Tensor]] = {}
    entries: dict[str, dict[str, Any]] = {}
    for name in methods:
        entry = entries.setdefault(name, {"error": skip.get(name)})
        if entry["error"]:
            continue
        start = time.monotonic()
        try:
            run = attention(name, size.causal, size.length, device)
            out = run(*leaves)

            def backward(out: Tensor = out) -> tuple[Tensor, ...]:
                return torch.autograd.grad(out, leaves, dout, retain_graph=True)

            results[name] = [out.detach(), *backward()]
            forwards[name] = lambda run=run: run(*leaves)  # type: ignore[misc]
            backwards[name] = backward
        except Exception as error:
            entry["error"] = brief(error)
        if name == FLEX:
            entry["compile_seconds"] = time.monotonic() - start
    for name, tensors in results.items():
        if reference in results:
            entries[name]["difference"] = difference(tensors, results[reference])
    results.clear()
    for kind, runs in (("forward", forwards), ("backward", backwards)):
        try:
            times = alternating(runs, budget)
        except Exception as error:
            for name in runs:
                entries[name]["error"] = f"timing the {kind}: {brief(error)}"
            continue
        for name, milliseconds in times.items():
            speed = size.operations(kind == "backward") / milliseconds / 1e9
            entries[name][kind] = {"milliseconds": milliseconds, "tflops": speed}
    return {
        "head_dim": size.head_dim,
        "length": size.length,
        "causal": size.causal,
        "batch": size.batch,
        "heads": size.heads,
        "methods": entries,
    }


def difference(tensors: Sequence[Tensor], reference: Sequence[Tensor]) -> float:
    """Largest relative difference in norm; NaN counts as infinite."""
    worst = 0.0
    for x, y in zip(tensors, reference, strict=True):
        found = float((x.float() - y.float()).norm() / y.float().norm().clamp(min=1e-30))
        worst = max(worst, found) if found == found else float("inf")  # noqa: PLR0124
    return worst


def tflops(row: dict[str, Any], method: str, kind: str) -> float | None:
    """Speed of a method whose results agree with the reference's; None where there is none to speak of."""
    entry = row["methods"].get(method, {})
    if entry.get("error") or entry.get("difference", 0.0) > LARGEST_DIFFERENCE or kind not in entry:
        return None
    return float(entry[kind]["tflops"])


def ratio(row: dict[str, Any], rival: str, kind: str) -> float | None:
    ours, theirs = tflops(row, OURS, kind), tflops(row, rival, kind)
    return None if ours is None or theirs is None else ours / theirs


def brief(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"[:300]
