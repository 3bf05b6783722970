"""README's tables of speeds, out of the recorded run; never typed by hand.

``python -m kernels.bench.readme`` writes them into kernels/README.md; ``--take FILE``, what ``kernels.bench
--json`` wrote, replaces the recorded run and draws its figure first.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

from kernels.bench.goals import judged
from kernels.bench.grid import tflops
from kernels.bench.methods import CUDNN, FLASH2, FLEX, OURS

README = Path(__file__).parents[1] / "README.md"
RECORD = Path(__file__).parent / "recorded" / "nvidia-h200.json"
_METHODS = (OURS, CUDNN, FLASH2, FLEX)


def ratios_table(record: dict[str, Any]) -> str:
    """Every ratio that has a goal."""
    lines = ["| ratio of speeds | measured | must | target | reached |", "|---|--:|--:|--:|---|"]
    for goal in judged(record):
        value = "-" if goal["ratio"] is None else f"{goal['ratio']:.2f}"
        lines.append(
            f"| {goal['goal']} | {value} | {goal['must']:.2f} | {goal['target']:.2f} | {goal['reached']} |"
        )
    return "\n".join(lines)


def speeds_table(record: dict[str, Any]) -> str:
    """TFLOP/s of every method on every problem of the grid."""
    names = " | ".join(_METHODS)
    lines = [f"| dim, length | {names} | {names} |", "|---|" + "--:|" * (2 * len(_METHODS))]
    for row in sorted(record["grid"], key=lambda x: (x["head_dim"], x["causal"], x["length"])):
        cells = [
            "-" if (speed := tflops(row, method, kind)) is None else f"{speed:.0f}"
            for kind in ("forward", "backward")
            for method in _METHODS
        ]
        causal = " causal" if row["causal"] else ""
        lines.append(f"| {row['head_dim']}, {row['length']}{causal} | {' | '.join(cells)} |")
    return "\n".join(lines)


def claims_text(record: dict[str, Any]) -> str:
    """Memory, and the speed-up over eager attention by length."""
    extras = record["extras"]
    lines = []
    per_token = extras.get("memory", {}).get("bytes per token", {})
    if isinstance(per_token, dict) and per_token.get(OURS):
        heads = extras["memory"]["heads"]
        found = ", ".join(f"{x / heads:.0f} at {n}" for n, x in per_token[OURS].items())
        lines.append(f"Peak bytes a token and head beyond inputs, outputs and gradients: {found} keys.")
    gains = {n: x["speed-up"] for n, x in extras.get("eager", {}).items() if isinstance(x, dict)}
    if gains:
        found = ", ".join(f"{x:.1f} at {n}" for n, x in gains.items())
        lines.append(f"Forward and backward together, over eager attention: {found} keys.")
    return "\n".join(lines)


def machine(record: dict[str, Any]) -> str:
    """What the run ran on, and when."""
    versions = f"torch {record['torch']}, Triton {record['triton']}, cuDNN {record['cudnn']}"
    return f"{record['device']}, bf16, {versions}, {record['date'][:10]}."


TABLES = {
    "ratios": lambda record: f"{machine(record)}\n\n{ratios_table(record)}",
    "speeds": speeds_table,
    "claims": claims_text,
}


def with_tables(text: str, record: dict[str, Any]) -> str:
    """The text with every ``<!-- NAME -->`` ... ``<!-- end -->`` block made anew.

    Raises ValueError where a block is missing.
    """
    for name, make in TABLES.items():
        pattern = rf"<!-- {name}: [^\n]*-->\n.*?<!-- end -->"
        if re.search(pattern, text, re.S) is None:
            raise ValueError(
                f"README: no block {name}; it must stand between <!-- {name}: --> and <!-- end -->"
            )
        block = f"<!-- {name}: python -m kernels.bench.readme -->\n{make(record)}\n<!-- end -->"
        text = re.sub(pattern, block.replace("\\", r"\\"), text, flags=re.S)
    return text


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m kernels.bench.readme", description=__doc__)
    parser.add_argument("--take", type=Path, help="what kernels.bench --json wrote: becomes the recorded run")
    arguments = parser.parse_args()
    if arguments.take is not None:
        from kernels.bench.figure import draw

        record = json.loads(arguments.take.read_text())
        if not record["cudnn"] or not record["grid"]:
            parser.error(f"--take is {arguments.take}, a run without a GPU; it must be one with speeds")
        record["goals"] = judged(record)
        RECORD.write_text(json.dumps(record, indent=1) + "\n")
        draw(record, RECORD.with_suffix(".png"))
    README.write_text(with_tables(README.read_text(), json.loads(RECORD.read_text())))
    return 0


if __name__ == "__main__":
    sys.exit(main())
