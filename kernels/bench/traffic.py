"""Bytes that one forward moves to and from the device's memory, beside the fewest possible.

``python -m kernels.bench.traffic --json FILE`` runs itself under Nsight Compute, which counts. The fewest:
q, k, v read and O written once, and a log-sum-exp of 4 bytes a query: 4 N d + 2 N numbers of 16 bits a head.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

_ROOT = Path(__file__).parents[2]
_METRICS = ("dram__bytes_read.sum", "dram__bytes_write.sum")
# (head dim, length, causal); more than the second-level cache holds.
_CASES = ((64, 4096, False), (64, 4096, True), (128, 4096, False), (128, 4096, True))
_NCU = "/usr/local/cuda/bin/ncu"
_BATCH, _WIDTH = 8, 2048
_UNITS = {"byte": 1.0, "Kbyte": 1e3, "Mbyte": 1e6, "Gbyte": 1e9}


def _run(dtype: torch.dtype) -> None:
    """Every case once, after a call that compiles; only these are profiled."""
    from kernels.interface import forward

    for dim, length, causal in _CASES:
        shape = (_BATCH, _WIDTH // dim, length, dim)
        q, k, v = (torch.randn(shape, device="cuda", dtype=dtype) for _ in range(3))
        options = {"causal": "top_left"} if causal else {}
        forward(q, k, v, **options)
        torch.cuda.synchronize()
        torch.cuda.profiler.start()  # type: ignore[no-untyped-call]
        forward(q, k, v, **options)
        torch.cuda.synchronize()
        torch.cuda.profiler.stop()  # type: ignore[no-untyped-call]


def counted(report: str) -> list[tuple[str, dict[str, float]]]:
    """(kernel, bytes by metric) of every launch in Nsight Compute's CSV output, in order."""
    start = next((i for i, line in enumerate(report.splitlines()) if line.startswith('"ID"')), None)
    if start is None:
        raise ValueError(f"no table in what the profiler printed: {report.strip()[-300:]}")
    found: dict[str, tuple[str, dict[str, float]]] = {}
    for row in csv.DictReader(io.StringIO("\n".join(report.splitlines()[start:]))):
        _, metrics = found.setdefault(row["ID"], (row["Kernel Name"], {}))
        metrics[row["Metric Name"]] = float(row["Metric Value"].replace(",", "")) * _UNITS[row["Metric Unit"]]
    return list(found.values())


def compared(launches: list[tuple[str, dict[str, float]]]) -> list[dict[str, Any]]:
    """A row a case: bytes, the fewest possible, and their ratio. ValueError: not one launch a case."""
    if len(launches) != len(_CASES):
        raise ValueError(f"{len(launches)} launches were counted; it must be {len(_CASES)}, one a case")
    rows = []
    for (dim, length, causal), (kernel, metrics) in zip(_CASES, launches, strict=True):
        heads = _BATCH * _WIDTH // dim
        fewest = 2.0 * heads * (4 * length * dim + 2 * length)
        moved = sum(metrics[name] for name in _METRICS)
        problem = {"head_dim": dim, "length": length, "causal": causal, "heads": heads, "kernel": kernel}
        rows.append({**problem, **metrics, "bytes": moved, "fewest": fewest, "ratio": moved / fewest})
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m kernels.bench.traffic", description=__doc__)
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    parser.add_argument(
        "--ncu", default=shutil.which("ncu") or "/usr/local/cuda/bin/ncu", help="the profiler"
    )
    parser.add_argument("--dtype", default="float16", choices=("float16", "bfloat16"))
    parser.add_argument("--run", action="store_true", help="only the launches")
    arguments = parser.parse_args()
    if arguments.run:
        _run(getattr(torch, arguments.dtype))
        return 0
    run = [sys.executable, "-m", "kernels.bench.traffic", "--run", "--dtype", arguments.dtype]
    flags = ["--profile-from-start", "off", "--csv", "--print-units", "base", "--metrics", ",".join(_METRICS)]
    done = subprocess.run(
        [arguments.ncu, *flags, *run],
        cwd=_ROOT,
        env={**os.environ, "PYTHONPATH": str(_ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        sys.stdout.write(f"{done.stdout[-2000:]}\n{done.stderr[-2000:]}\n")
        return 1
    rows = compared(counted(done.stdout))
    for row in rows:
        causal = " causal" if row["causal"] else ""
        sys.stdout.write(
            f"d={row['head_dim']} n={row['length']}{causal}: {row['bytes'] / 1e6:.1f} MB, "
            f"fewest {row['fewest'] / 1e6:.1f} MB, {row['ratio']:.3f}\n"
        )
    if arguments.json is not None:
        arguments.json.write_text(json.dumps({"dtype": arguments.dtype, "rows": rows}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
