"""What a campaign has done so far, summed from its case lines: the same after a kill as before it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from flashcheck.fuzz.hunter import CaseEvent
from flashcheck.fuzz.statistics import TensorStatistics

PARTS = ("build", "compile", "kernel", "judge")


class LineWriter:
    """Case lines of one writer: what its earlier lines say already is left out."""

    def __init__(self) -> None:
        self._labels: set[tuple[str, str]] = set()
        self._worst: dict[tuple[str, str], float] = {}
        self._signatures: set[str] = set()

    def line(self, event: CaseEvent, signature: str = "") -> dict[str, Any]:
        """The JSON of one case; its spec is there where it holds a record or fails."""
        report, dtype = event.report, event.case.spec.dtype
        records = [t for t, m in report.margins.items() if m > self._worst.get((dtype, t), -1.0)]
        if report.masked or event.group:
            records = []
        self._worst |= {(dtype, t): report.margins[t] for t in records}
        new = [label for label in report.covered if (dtype, label) not in self._labels]
        self._labels |= {(dtype, label) for label in new}
        seconds = dict(report.seconds)
        first = seconds.pop("first", 0.0)
        fresh = bool(signature) and signature not in self._signatures
        self._signatures.add(signature)
        part = "compile" if fresh else "kernel"
        seconds[part] = seconds.get(part, 0.0) + first
        line: dict[str, Any] = {"shard": event.shard, "n": event.index, "dtype": dtype, "seconds": seconds}
        line |= {"margins": {t: report.margins[t] for t in records}} if records else {}
        line |= {"signature": signature} if fresh else {}
        line |= {"covered": new} if new else {}
        line |= {"masked": list(report.masked)} if report.masked else {}
        line |= {"group": event.group.id} if event.group else {}
        line |= {"fault": report.judge_fault} if report.judge_fault else {}
        line |= {"statistics": report.statistics} if report.statistics else {}
        if report.against:
            line |= {"against": {t: list(n) for t, n in report.against.items()}}
        if records or report.against or event.group or report.judge_fault:
            line["case"] = event.case.to_json()
        return line


@dataclass(slots=True)
class Totals:
    """Sums over case lines.

    Attributes:
        cases: by dtype; failures: by group id; seconds: by part of the work.
        worst: (dtype, tensor) -> (margin, case as JSON), over cases that fail nothing.
        covered: dtype -> labels. faults: the judge's own, text -> count.
        statistics: (dtype, tensor) -> sums over the cases drawn for them.
    """

    cases: Counter[str] = field(default_factory=Counter)
    failures: Counter[str] = field(default_factory=Counter)
    seconds: Counter[str] = field(default_factory=Counter)
    worst: dict[tuple[str, str], tuple[float, dict[str, Any]]] = field(default_factory=dict)
    covered: dict[str, set[str]] = field(default_factory=dict)
    faults: Counter[str] = field(default_factory=Counter)
    statistics: dict[tuple[str, str], TensorStatistics] = field(default_factory=dict)

    @property
    def total(self) -> int:
        return sum(self.cases.values())

    def add(self, line: dict[str, Any]) -> None:
        dtype = line["dtype"]
        self.cases[dtype] += 1
        for part, spent in line["seconds"].items():
            self.seconds[part] += spent
        for tensor, margin in line.get("margins", {}).items():
            if margin > self.worst.get((dtype, tensor), (-1.0, {}))[0]:
                self.worst[dtype, tensor] = margin, line["case"]
        self.covered.setdefault(dtype, set()).update(line.get("covered", ()))
        self.failures.update(line.get("masked", ()))
        if "group" in line:
            self.failures[line["group"]] += 1
        for tensor, sums in line.get("statistics", {}).items():
            self.statistics.setdefault((dtype, tensor), TensorStatistics()).add(sums)
        if "fault" in line:
            self.faults[line["fault"]] += 1


def totals_of(lines: Iterable[dict[str, Any]]) -> Totals:
    totals = Totals()
    for line in lines:
        totals.add(line)
    return totals
