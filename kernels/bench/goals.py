"""What the kernels are measured against: ratios of speeds, and the goals set for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from kernels.bench.grid import ratio
from kernels.bench.means import geometric_mean
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


def _each(label: str, must: float, target: float, stretch: float | None, *path: str) -> list[Goal]:
    """A goal for the forward and the same for the backward."""
    return [
        Goal(f"{kind} {label}", must, target, stretch, _extra(*path, f"{kind} ratio"))
        for kind in ("forward", "backward")
    ]


GOALS = (
    Goal("forward / cuDNN, d=64, mean", 0.88, 0.97, 1.05, _mean(CUDNN, "forward", 64)),
    Goal("forward / cuDNN, d=128, mean", 0.80, 0.88, 1.0, _mean(CUDNN, "forward", 128)),
    Goal("backward / cuDNN, deterministic, mean", 0.60, 0.66, None, _mean(CUDNN, "backward")),
    Goal("forward / flex_attention, least", 1.0, 1.15, 1.3, _least(FLEX, "forward")),
    Goal("forward / FlashAttention-2, least", 1.2, 1.4, 1.6, _least(FLASH2, "forward")),
    Goal("backward / flex_attention, mean", 1.0, 1.15, 1.3, _mean(FLEX, "backward")),
    Goal("backward / FlashAttention-2, mean", 1.0, 1.3, 1.6, _mean(FLASH2, "backward")),
    *_each("d=96 / own d=128", 0.75, 0.85, 0.95, "head dims", "96"),
    *_each("d=192 / own d=128", 0.75, 0.85, 0.95, "head dims", "192"),
    *_each("packed uniform / dense", 0.92, 0.97, None, "packed", "uniform"),
    *_each("packed ragged / dense", 0.80, 0.88, None, "packed", "ragged"),
    Goal("fp8 forward / own bf16, d=128, mean", 1.25, 1.4, 1.6, _extra("fp8", "e4m3", "forward ratio")),
    Goal(
        "the same, v's keys contiguous",
        1.25,
        1.4,
        1.6,
        _extra("fp8", "e4m3, v's keys contiguous", "forward ratio"),
    ),
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
