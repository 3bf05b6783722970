"""What the kernels are measured against: ratios of speeds, and the goals set for them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from kernels.bench.grid import ratio
from kernels.bench.methods import CUDNN, FLASH2, FLEX

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Goal:
    """A ratio and its goals; ``value`` takes the record of a run, and is None where nothing was measured."""

    label: str
    must: float
    target: float
    stretch: float | None
    value: Callable[[dict[str, Any]], float | None]


def geometric_mean(values: Iterable[float | None]) -> float | None:
    """Of those that there are; None if there are none."""
    logs = [math.log(x) for x in values if x is not None]
    return math.exp(sum(logs) / len(logs)) if logs else None


def _mean(rival: str, kind: str, head_dim: int | None = None) -> Callable[[dict[str, Any]], float | None]:
    return lambda record: geometric_mean(_ratios(record["grid"], rival, kind, head_dim))


def _least(rival: str, kind: str) -> Callable[[dict[str, Any]], float | None]:
    return lambda record: min(_ratios(record["grid"], rival, kind), default=None)


def _ratios(rows: Sequence[Row], rival: str, kind: str, head_dim: int | None = None) -> list[float]:
    found = (ratio(row, rival, kind) for row in rows if head_dim in (None, row["head_dim"]))
    return [x for x in found if x is not None]


def _extra(*path: str) -> Callable[[dict[str, Any]], float | None]:
    def value(record: dict[str, Any]) -> float | None:
        found: Any = record.get("extras", {})
        for name in path:
            found = found.get(name) if isinstance(found, dict) else None
        return None if found is None else float(found)

    return value


GOALS = (
    Goal("forward / cuDNN, d=64, mean", 0.88, 0.97, 1.05, _mean(CUDNN, "forward", 64)),
    Goal("forward / cuDNN, d=128, mean", 0.80, 0.88, 1.0, _mean(CUDNN, "forward", 128)),
    Goal("backward / cuDNN, deterministic, mean", 0.60, 0.66, None, _mean(CUDNN, "backward")),
    Goal("forward / flex_attention, least", 1.0, 1.15, 1.3, _least(FLEX, "forward")),
    Goal("forward / FlashAttention-2, least", 1.2, 1.4, 1.6, _least(FLASH2, "forward")),
    Goal("backward / flex_attention, mean", 1.0, 1.15, 1.3, _mean(FLEX, "backward")),
    Goal("backward / FlashAttention-2, mean", 1.0, 1.3, 1.6, _mean(FLASH2, "backward")),
    Goal("forward d=96 / own d=128", 0.75, 0.85, 0.95, _extra("head dims", "96", "forward ratio")),
    Goal("forward d=192 / own d=128", 0.75, 0.85, 0.95, _extra("head dims", "192", "forward ratio")),
    Goal("forward packed uniform / dense", 0.92, 0.97, None, _extra("packed", "uniform", "forward ratio")),
    Goal("forward packed ragged / dense", 0.80, 0.88, None, _extra("packed", "ragged", "forward ratio")),
    Goal("fp8 forward / own bf16, d=128", 1.25, 1.4, 1.6, _extra("fp8", "e4m3", "forward ratio")),
)


def judged(record: dict[str, Any]) -> list[dict[str, Any]]:
    """Every goal with its measured ratio, and the highest level that it reaches; without a GPU, none."""
    return [
        {
            "goal": goal.label,
            "ratio": (value := goal.value(record) if record["cudnn"] else None),
            "must": goal.must,
            "target": goal.target,
            "stretch": goal.stretch,
            "reached": _reached(goal, value),
        }
        for goal in GOALS
    ]


def _reached(goal: Goal, value: float | None) -> str:
    if value is None:
        return "not measured"
    if goal.stretch is not None and value >= goal.stretch:
        return "stretch"
    if value >= goal.target:
        return "target"
    return "must" if value >= goal.must else "missed"
