"""What a run prints."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from kernels.bench.grid import LARGEST_DIFFERENCE
from kernels.bench.methods import OURS


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def head(record: dict[str, Any]) -> str:
    cudnn = f", cuDNN {record['cudnn']}" if record["cudnn"] else ""
    return (
        f"{record['device']}, torch {record['torch']}, Triton {record['triton']}{cudnn}\n"
        "TFLOP/s, bf16, forward | backward; in brackets: ours over it"
    )


def row(measured: dict[str, Any], methods: Sequence[str]) -> str:
    """One problem: every method's speeds, and ours over them."""
    causal = " causal" if measured["causal"] else ""
    lines = [f"d={measured['head_dim']} n={measured['length']}{causal}"]
    ours = measured["methods"].get(OURS, {})
    for name in methods:
        entry = measured["methods"].get(name, {})
        if entry.get("error"):
            lines.append(f"  {name:18}{entry['error']}")
            continue
        cells = []
        for kind in ("forward", "backward"):
            if kind not in entry:
                continue
            speed = entry[kind]["tflops"]
            ratio = f" ({ours[kind]['tflops'] / speed:.2f})" if name != OURS and kind in ours else ""
            cells.append(f"{speed:6.1f}{ratio:7}")
        wrong = entry.get("difference", 0.0) > LARGEST_DIFFERENCE
        note = f"  WRONG: differs by {entry['difference']:.1e}, not counted" if wrong else ""
        lines.append(f"  {name:18}{' | '.join(cells)}{note}")
    return "\n".join(lines)


def extras(found: dict[str, Any]) -> str:
    """A line a measurement."""
    lines = []
    for name, entry in found.items():
        if "error" in entry:
            lines.append(f"{name}: {entry['error']}")
        for label, value in entry.items() if "error" not in entry else ():
            lines.append(f"{name}, {label}: {_brief(value)}")
    return "\n".join(lines)


def _brief(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_brief(x)}" for name, x in value.items())
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def goals(judged: Sequence[dict[str, Any]]) -> str:
    """The ratios beside their goals."""
    lines = [f"{'ratio of speeds':42}{'measured':>9}{'must':>7}{'target':>8}{'stretch':>9}  reached"]
    for goal in judged:
        value = "-" if goal["ratio"] is None else f"{goal['ratio']:.2f}"
        stretch = "-" if goal["stretch"] is None else f"{goal['stretch']:.2f}"
        lines.append(
            f"{goal['goal']:42}{value:>9}{goal['must']:7.2f}{goal['target']:8.2f}{stretch:>9}"
            f"  {goal['reached']}"
        )
    return "\n".join(lines)
