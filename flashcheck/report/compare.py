"""Two certificates of one kernel: did its precision or what was judged get worse? Speed is left out."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Iterable
from dataclasses import dataclass

from flashcheck.errors import ArgumentError
from flashcheck.report.certificate import Certificate, TensorPart

DEFAULT_LIMITS = {"margin": 0.10, "rms": 0.05}
"""Largest accepted growth of the worst margin, and of the rms error, relative."""

_ORDER = ("certified", "incomplete", "rejected", "judge failed")


@dataclass(frozen=True, slots=True)
class Row:
    """One tensor of one dtype in both.

    Attributes:
        margin, rms: (old, new): worst margins, and rms ratios (None: not predicted).
        paired: median growth of the rms error over problems that both judged (0: none); pairs: how many.
        worse: why it is a regression; empty: it is none.
    """

    dtype: str
    tensor: str
    margin: tuple[float, float]
    rms: tuple[float | None, float | None]
    paired: float | None
    pairs: int
    worse: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Comparison:
    """All rows, and what is worse beyond them: the verdict, lost tensors, lost coverage."""

    rows: list[Row]
    worse: list[str]

    @property
    def regressed(self) -> bool:
        return bool(self.worse) or any(row.worse for row in self.rows)


def limits_from(words: Iterable[str]) -> dict[str, float]:
    """``margin:10%`` and ``rms:0.05`` as relative growth; what is not named keeps its default.

    Raises ArgumentError for anything else.
    """
    limits = dict(DEFAULT_LIMITS)
    for word in words:
        match = re.fullmatch(r"(margin|rms):(\d+(?:\.\d+)?)(%?)", word.strip())
        if match is None:
            raise ArgumentError("--fail-if", word, "margin:N% or rms:N%, such as margin:10%")
        limits[match[1]] = float(match[2]) / (100 if match[3] else 1)
    return limits


def compare(old: Certificate, new: Certificate, limits: dict[str, float] | None = None) -> Comparison:
    """What changed from ``old`` to ``new``; growth within ``limits`` is no regression."""
    limits = DEFAULT_LIMITS if limits is None else limits
    worse: list[str] = []
    if _ORDER.index(new.verdict) > _ORDER.index(old.verdict):
        worse.append(f"verdict: {old.verdict} became {new.verdict}")
    after = {(t.dtype, t.tensor): t for t in new.tensors}
    rows = []
    for t in old.tensors:
        if (t.dtype, t.tensor) in after:
            rows.append(_row(t, after[t.dtype, t.tensor], limits))
        else:
            worse.append(f"{t.dtype} {t.tensor} is no longer judged")
    for dtype, missing in new.coverage.missing.items():
        lost = [x for x in missing if x not in old.coverage.missing.get(dtype, [])]
        if dtype in old.run.dtypes and lost:
            worse.append(f"no longer judged, {dtype}: {', '.join(lost)}")
    lost = [x for x in old.coverage.required if x not in new.coverage.required]
    if lost:
        worse.append(f"no longer declared: {', '.join(lost)}")
    return Comparison(rows, worse)


def _row(old: TensorPart, new: TensorPart, limits: dict[str, float]) -> Row:
    paired, pairs = _paired(old, new)
    worse = []
    if new.worst_margin > 1 >= old.worst_margin:
        worse.append("outside its bound")
    elif growth(old.worst_margin, new.worst_margin) > limits["margin"]:
        worse.append(f"margin grew {percent(growth(old.worst_margin, new.worst_margin))}")
    if old.rms_ratio is not None and new.rms_ratio is not None:
        grown = growth(old.rms_ratio, new.rms_ratio)
        if grown > limits["rms"]:
            worse.append(f"rms ratio grew {percent(grown)}")
    if paired is not None and paired > limits["rms"]:
        worse.append(f"rms error grew {percent(paired)} on the same {pairs} problems")
    margins = (old.worst_margin, new.worst_margin)
    return Row(old.dtype, old.tensor, margins, (old.rms_ratio, new.rms_ratio), paired, pairs, tuple(worse))


def _paired(old: TensorPart, new: TensorPart) -> tuple[float | None, int]:
    if old.points is None or new.points is None:
        return None, 0
    before = dict(zip(old.points.problem, old.points.rms_error, strict=True))
    changes = [
        growth(earlier, later)
        for problem, later in zip(new.points.problem, new.points.rms_error, strict=True)
        if later is not None and (earlier := before.get(problem)) is not None
    ]
    return (statistics.median(changes), len(changes)) if changes else (None, 0)


def growth(old: float, new: float) -> float:
    """new / old - 1; inf from 0 to something, 0 where both are the same."""
    if old == new:
        return 0.0
    return math.inf if old == 0 else new / old - 1


def percent(x: float) -> str:
    """``+12 %``."""
    return "without limit" if math.isinf(x) else f"{100 * x:+.3g} %"
