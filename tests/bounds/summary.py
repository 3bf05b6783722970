"""Summary of soundness runs: per kernel, dtype and tensor the cases, elements, worst margin and rms ratio.

    python -m tests.bounds.summary soundness-1.json soundness-2.json --out golden/soundness.json

Runs of one set of versions and different seeds add up. An element counts as ``over`` where it lies outside
its bound, ``outside_algorithm`` where it lies outside the centred interval of the declared algorithm.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections import Counter
from pathlib import Path
from typing import Any


def summary(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """The runs as one table. Exits where they do not belong together."""
    first = runs[0]
    if any(run["versions"] != first["versions"] or run["parts"] != first["parts"] for run in runs):
        sys.exit("the runs are of different versions or kernels")
    if len({run["seed"] for run in runs}) != len(runs):
        sys.exit("two of the runs have the same seed: they are the same problems")
    keys = sorted({key for run in runs for key in run["lines"]})
    lines = {key: _line([run["lines"][key] for run in runs if key in run["lines"]]) for key in keys}
    families = sum((Counter(run["families"]) for run in runs), start=Counter[str]())
    return {
        "made_by": "python -m tests.bounds.soundness, python -m tests.bounds.summary",
        "date": max(run["date"] for run in runs),
        "versions": first["versions"],
        "runs": [{"seed": run["seed"], "cases": run["done"]} for run in runs],
        "problems": sum(families.values()),
        "families": len(families),
        "elements": sum(line["elements"] for line in lines.values()),
        "over": sum(line["over"] for line in lines.values()),
        "outside_algorithm": sum(line["outside_algorithm"] for line in lines.values()),
        "faults": [fault for run in runs for fault in run["faults"]],
        "lines": lines,
    }


def _line(parts: list[dict[str, Any]]) -> dict[str, Any]:
    total = {name: sum(x[name] for x in parts) for name in ("cases", "elements", "over", "outside_algorithm")}
    worst = {
        "worst_margin": max(float(x["worst"]) for x in parts),
        "worst_algorithm": max(float(x["worst_algorithm"]) for x in parts),
    }
    ratios = {"rms_ratio": _ratio(parts, "rms"), "gating_rms_ratio": _ratio(parts, "gating")}
    return {**total, **{name: round(x, 4) for name, x in worst.items()}, **ratios}


def _ratio(parts: list[dict[str, Any]], name: str) -> float | None:
    """Measured over predicted rms error, over rows with ordinary values; None where there are none."""
    rows = sum(x[name]["rows"] for x in parts)
    return round(math.sqrt(sum(x[name]["measured"] for x in parts) / rows), 4) if rows else None


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("runs", nargs="+", type=Path, help="files that tests.bounds.soundness wrote")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args(arguments)
    found = summary([json.loads(path.read_text()) for path in given.runs])
    text = json.dumps({k: v for k, v in found.items() if k != "lines"}, indent=1)
    rows = ",\n".join(f"  {json.dumps(key)}: {json.dumps(line)}" for key, line in found["lines"].items())
    given.out.write_text(f'{text[:-2]},\n "lines": {{\n{rows}\n }}\n}}\n')
    print(f"{found['problems']:,} problems, {found['elements']:,} elements, {found['over']} over")
    return 0


if __name__ == "__main__":
    sys.exit(main())
