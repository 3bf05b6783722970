"""Rows on each rung of the oracle, per value family: ``python -m tests.oracle.climbs CERTIFICATE...``."""

from __future__ import annotations

import sys
from collections import Counter, defaultdict
from pathlib import Path

from flashcheck.report.certificate import Certificate

RUNGS = ("fp64", "double_double", "exact")


def main(paths: list[str]) -> None:
    rows: dict[tuple[str, str], Counter[str]] = defaultdict(Counter)
    for path in paths:
        for part in Certificate.from_json(Path(path).read_text(encoding="utf-8")).oracle:
            counts = {rung: getattr(part, rung) for rung in (*RUNGS, "unresolved")}
            rows[part.family, part.direction].update(counts)
            rows["all", part.direction].update(counts)
    print(f"{'family':20} {'direction':10} {'rows':>8} {'fp64':>8} {'dd':>8} {'exact':>8} {'unresolved':>10}")
    for (family, direction), counts in sorted(rows.items()):
        total = sum(counts[rung] for rung in RUNGS)
        shares = " ".join(f"{counts[rung] / total:8.2%}" for rung in RUNGS)
        print(f"{family:20} {direction:10} {total:8,} {shares} {counts['unresolved']:10}")


if __name__ == "__main__":
    main(sys.argv[1:])
