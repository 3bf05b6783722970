"""What a job's file says, in a few words for the table."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from flashcheck.fuzz.rate import told
from tests.device.jobs import Job


def verdict(job: Job, folder: Path) -> str:
    """One line; the last line of the log where there is no file, or nothing reads it."""
    path = folder / f"{job.name}.json"
    if path.is_file() and job.kind in READERS:
        return READERS[job.kind](json.loads(path.read_text(encoding="utf-8")))
    return last_line(folder / f"{job.name}.log")


def last_line(log: Path) -> str:
    """The last line with text, cut to 100 characters."""
    lines = [x.strip() for x in log.read_text(errors="replace").splitlines() if x.strip()]
    return lines[-1][-100:] if lines else ""


def _certificate(data: dict[str, Any]) -> str:
    margins = [float(t["worst_margin"]) for t in data["tensors"]]
    checks = sorted({f["check"] for f in data["findings"]})
    worst = f", worst margin {max(margins):.3f}" if margins else ""
    counted = f"{data['run']['judged']} of {data['run']['planned']} problems"
    return f"{data['verdict']}, {counted}{worst}" + (f"; {', '.join(checks)}" if checks else "")


def _soundness(data: dict[str, Any]) -> str:
    lines = data["lines"].values()
    over, outside = (sum(line[name] for line in lines) for name in ("over", "outside_algorithm"))
    worst = max((float(line["worst"]) for line in lines), default=0.0)
    faults = len(data["faults"])
    counted = f"{over} over, {outside} outside, {faults} faults"
    return f"{data['done']:,} problems, worst margin {worst:.3f}, {counted}"


def _honest(data: dict[str, Any]) -> str:
    rate = data["done"] / max(data["wall_seconds"], 1e-9)
    return f"{data['done']:,} problems, {data['alarms']} alarms, {rate:.1f} a second"


def _campaigns(data: dict[str, Any]) -> str:
    rows = [
        f"{r['workers']} workers {r['cases']:,} cases, {r['cases_per_second']:g} a second, "
        f"{len(r['findings'])} findings"
        for r in data["campaigns"]
    ]
    return "; ".join(rows)


def _rates(data: dict[str, Any]) -> str:
    return "; ".join(told(row) for row in data["rates"])


def _mutants(data: dict[str, Any]) -> str:
    summary = data.get("summary", {})
    return f"{summary.get('found', 0)} of {summary.get('mutants', 0)} faults found"


def _audit(data: dict[str, Any]) -> str:
    rows = data.get("mutants", [])
    return f"{sum(row['good'] for row in rows)} of {len(rows)} faults caught"


def _edges(data: dict[str, Any]) -> str:
    return "; ".join(text for entry in data.values() for text in entry["edges"].values())[:100]


READERS: dict[str, Callable[[dict[str, Any]], str]] = {
    "gate": _certificate,
    "certificate": _certificate,
    "soundness": _soundness,
    "honest": _honest,
    "honest-cpu": _honest,
    "fuzz": _campaigns,
    "rate": _rates,
    "mutants": _mutants,
    "audit": _audit,
    "edges": _edges,
}
