"""Times launch configurations of the kernels: ``python -m kernels.bench.sweep --json FILE``.

The dense 16-bit kernels by default; ``--kernels fp8,packed`` for the forward of others; ``--missed`` for the
short list of what is worth timing for the goals that were missed.

Compiles every candidate in parallel first; then, in a process for each head dim and mask, judges every one
against fp64 and fp32 references and for repeatability, times it, and prints the best as entries of
`kernels.tuning`. Results are written after every kernel.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import triton

from kernels.bench.candidates import COMPILED_ONLY, KERNELS, OTHERS, candidates, missed, shape_of
from kernels.bench.problems import TOKENS, WIDTH, size
from kernels.tuning import Tile, hopper_tables, padded

_ROOT = Path(__file__).parents[2]
_SECTIONS = [None, 1, 16, 1 << 20]  # heads side by side: the default, one, some, all
_COMPILE_BATCH = 3  # candidates a compiling process


def _spawn(work: dict[str, Any], on_line: Callable[[dict[str, Any]], None], limit: float) -> str:
    """Run a worker to its end or its limit; if it failed, its exit code and the end of its stderr."""
    environment = {**os.environ, "PYTHONPATH": str(_ROOT)}
    environment.pop("TRITON_INTERPRET", None)
    if not torch.cuda.is_available() and work["mode"] == "measure":
        environment["TRITON_INTERPRET"] = "1"
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", "kernels.bench.sweep_worker", json.dumps(work)],
            cwd=_ROOT,
            env=environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=errors,
        )
        timer = threading.Timer(max(limit, 1.0), process.kill)
        timer.start()
        try:
            for line in process.stdout or ():
                if line.startswith("{"):
                    on_line(json.loads(line))
            code = process.wait()
        finally:
            timer.cancel()
            process.kill()
        errors.seek(0)
        return "" if code == 0 else f"exit {code}: {errors.read().strip()[-300:]}"


def compile_all(groups: Iterable[dict[str, Any]], workers: int, limit: float) -> dict[str, Any]:
    """Resources of every candidate, by group and tile; fills Triton's cache on the way."""
    found: dict[str, Any] = {}
    jobs = []
    for group in groups:
        tiles = group["tiles"]
        for i in range(0, len(tiles), _COMPILE_BATCH):
            jobs.append({**group, "mode": "compile", "tiles": tiles[i : i + _COMPILE_BATCH]})

    def run(job: dict[str, Any]) -> None:
        def keep(line: dict[str, Any]) -> None:
            found[_key(job, line["tile"])] = line

        problem = _spawn(job, keep, limit)
        if problem:
            found[_key(job, "failed")] = problem

    with ThreadPoolExecutor(workers) as pool:
        list(pool.map(run, jobs))
    return found


def _key(group: dict[str, Any], tile: Any) -> str:
    return f"{group['kernel']} {group['head_dim']} {group['causal']} {tile}"


def measure(groups: list[dict[str, Any]], limit: float) -> dict[str, list[dict[str, Any]]]:
    """Lines of the candidates of groups that share tensors, by kernel.

    One that ends the process is marked, and the rest go on in a new one.
    """
    lines: dict[str, list[dict[str, Any]]] = {group["kernel"]: [] for group in groups}
    waiting = [
        [group["kernel"], tile, section]
        for group in groups
        for tile in group["tiles"]
        for section in group["sections"]
    ]
    deadline = time.monotonic() + limit
    while waiting and time.monotonic() < deadline:
        seen: list[list[Any]] = []

        def keep(line: dict[str, Any], seen: list[list[Any]] = seen) -> None:
            seen.append([line["kernel"], line["tile"], line["section"]])
            lines[line["kernel"]].append(line)

        work = {**groups[0], "mode": "measure", "runs": waiting}
        problem = _spawn(work, keep, deadline - time.monotonic())
        waiting = [run for run in waiting if run not in seen]
        if problem and waiting:
            kernel, tile, section = waiting.pop(0)
            lines[kernel].append({"kernel": kernel, "tile": tile, "section": section, "error": problem})
        elif not seen:
            break
    return lines


def together(groups: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Groups whose candidates run on the same tensors, and so in one process."""
    found: dict[Any, list[dict[str, Any]]] = {}
    for group in groups:
        family = ["fp8" in group["kernel"], "packed" in group["kernel"]]
        found.setdefault((*family, group["head_dim"], group["causal"]), []).append(group)
    return list(found.values())


def speed(group: dict[str, Any], line: dict[str, Any]) -> float:
    """Geometric mean over the lengths, TFLOP/s as counted for the pass (a kernel's share of the backward)."""
    if not usable(line):
        return 0.0
    logs = []
    for length, milliseconds in line["milliseconds"].items():
        problem = size(group["head_dim"], int(length), group["causal"], group["tokens"], group["width"])
        share = {"dkdv": 4 / 5, "dq": 3 / 5, "dk": 3 / 5, "dv": 2 / 5}.get(group["kernel"])
        operations = problem.operations(backward=share is not None) * (share or 1.0)
        logs.append(math.log(operations / milliseconds / 1e9))
    return math.exp(sum(logs) / len(logs)) if logs else 0.0


def usable(line: dict[str, Any]) -> bool:
    """Measured, right and repeatable."""
    return (
        line["error"] is None
        and bool(line.get("milliseconds"))
        and line["worst_error"] < 1
        and line["repeatable"]
    )


def _report(group: dict[str, Any], lines: list[dict[str, Any]]) -> None:
    mask = "band" if group["causal"] else "all"
    for line in sorted(lines, key=lambda x: -speed(group, x)):
        times = " ".join(f"{n}:{t:.3f}" for n, t in line.get("milliseconds", {}).items())
        facts = {n: line[n] for n in ("registers", "programs", "spills", "waits") if n in line}
        verdict = "" if usable(line) else f" NOT USABLE {line.get('error') or ''}"
        if line.get("repeatable") is False or line.get("worst_error", 0) >= 1:
            verdict += f" error {line.get('worst_error')} repeatable {line.get('repeatable')}"
        print(
            f"{group['kernel']:12}{group['head_dim']:4} {mask:5}{line['tile']!s:24} "
            f"section {line['section']!s:8}{speed(group, line):7.1f} TFLOP/s  {times} ms {facts}{verdict}",
            flush=True,
        )


def _tiles(kernel: str, head_dim: int, current: bool) -> list[Tile]:
    """Candidates; of the dense 16-bit kernels only those of the table, if ``current``."""
    if not current or kernel not in KERNELS:
        return candidates(kernel, head_dim)
    return list(dict.fromkeys(tile for dim, tile in hopper_tables()[kernel] if dim == padded(head_dim)))


def _save(path: Path | None, record: dict[str, Any]) -> None:
    if path is not None:
        part = path.with_suffix(".part")
        part.write_text(json.dumps(record, indent=1))
        part.replace(path)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m kernels.bench.sweep", description=__doc__)
    parser.add_argument("--json", type=Path, help="where to write all results")
    parser.add_argument("--seconds", type=float, default=300, help="budget for everything (default 300)")
    parser.add_argument("--head-dims", default="128,64", help="default 128,64")
    parser.add_argument(
        "--kernels",
        default=",".join(KERNELS),
        help=f"of {', '.join((*KERNELS, *OTHERS))}; default {','.join(KERNELS)}",
    )
    parser.add_argument(
        "--compile-only", action="store_true", help="no measurement: resources, without a GPU"
    )
    parser.add_argument("--no-orders", action="store_true", help="only the default order of heads")
    parser.add_argument("--current", action="store_true", help="dense 16-bit kernels: only the table's tiles")
    parser.add_argument(
        "--missed", action="store_true", help="instead: the short list for goals that were missed"
    )
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="compiling processes")
    arguments = parser.parse_args()
    unknown = set(arguments.kernels.split(",")) - {*KERNELS, *OTHERS}
    if unknown:
        parser.error(f"--kernels: {', '.join(sorted(unknown))} is none of {', '.join((*KERNELS, *OTHERS))}")
    start = time.monotonic()
    on_gpu = torch.cuda.is_available()
    chosen = arguments.kernels.split(",")
    runnable = {*KERNELS, *OTHERS} - (set() if on_gpu or arguments.compile_only else {*COMPILED_ONLY})
    chosen = [kernel for kernel in chosen if kernel in runnable]
    lengths, tokens, width = ([1024, 4096, 16384], TOKENS, WIDTH) if on_gpu else ([40], 40, 128)
    work = [
        (kernel, dim, causal, _tiles(kernel, dim, arguments.current))
        for kernel in chosen
        for dim in map(int, arguments.head_dims.split(","))
        for causal in (False, True)
    ]
    if arguments.missed:
        work = [(kernel, dim, causal, tiles) for kernel, dim, causal, tiles in missed() if kernel in runnable]
    orders = on_gpu and not (arguments.no_orders or arguments.missed)
    groups = [
        {
            "kernel": kernel,
            "head_dim": dim,
            "causal": causal,
            "tiles": [shape_of(tile) for tile in tiles],
            "sections": _SECTIONS if kernel in OTHERS and orders else [None],
            "lengths": lengths,
            "tokens": tokens,
            "width": width,
            "milliseconds": 30.0,
        }
        for kernel, dim, causal, tiles in work
        if tiles
    ]
    record: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "device": torch.cuda.get_device_name() if on_gpu else "interpreter: not a speed",
        "torch": torch.__version__,
        "triton": triton.__version__,
        "groups": [],
    }
    print(f"{record['device']}, torch {record['torch']}, triton {record['triton']}")
    resources: dict[str, Any] = {}
    if on_gpu or arguments.compile_only:
        # Persistent launches run the same code as the others.
        different = [group for group in groups if not group["kernel"].endswith("persistent")]
        resources = compile_all(different, arguments.workers, arguments.seconds)
        failed = [f"{key}: {x}" for key, x in resources.items() if isinstance(x, str) or x["error"]]
        print(f"compiled {len(resources)} in {time.monotonic() - start:.0f} s", *failed, sep="\n", flush=True)
    best: list[str] = []
    measured: dict[str, list[dict[str, Any]]] = {}
    families = together(groups)
    for i, family in enumerate(families):
        left = arguments.seconds - (time.monotonic() - start)
        if not arguments.compile_only:
            # A family may use what is left, shared among those still to come; the first get a little more.
            measured = measure(family, min(left, 1.5 * left / (len(families) - i)))
        for group in family:
            left = arguments.seconds - (time.monotonic() - start)
            compiled = [resources.get(_key(group, tile), {}) for tile in group["tiles"]]
            if arguments.compile_only:
                lines = [
                    {**x, "tile": t, "section": None, "error": x.get("error")}
                    for x, t in zip(compiled, group["tiles"], strict=True)
                ]
            else:
                lines = measured[group["kernel"]]
                best_lines = sorted(lines, key=lambda x: -speed(group, x))[:1]
                ordered = orders and len(group["sections"]) == 1
                if best_lines and usable(best_lines[0]) and ordered and on_gpu and left > 20:
                    sections = {**group, "tiles": [best_lines[0]["tile"]], "sections": [1, 4, 16, 1 << 20]}
                    lines += measure([sections], min(left, 20.0))[group["kernel"]]
                lines = [{**resources.get(_key(group, list(line["tile"])), {}), **line} for line in lines]
            _report(group, lines)
            record["groups"].append({**group, "results": lines})
            record["seconds"] = time.monotonic() - start
            _save(arguments.json, record)
            top = max(lines, key=lambda x: speed(group, x), default=None)
            if top is not None and usable(top):
                numbers = ", ".join(map(str, top["tile"]))
                mask = "band" if group["causal"] else "all"
                best.append(
                    f"({group['kernel']!r}, {group['head_dim']}) {mask:4}: Tile({numbers}) "
                    f"# section {top['section']}, {speed(group, top):.0f} TFLOP/s"
                )
    print("best, for kernels/tuning.py:", *best, sep="\n")
    print(f"{time.monotonic() - start:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
