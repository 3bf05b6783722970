"""Measures the fuzzer; every number of the documentation comes from here.

python -m flashcheck.fuzz.measure speed torch.sdpa.flash --seconds 60 --out speed.json
python -m flashcheck.fuzz.measure cpu torch.sdpa.flash --seconds 30 --out cpu.json
python -m flashcheck.fuzz.measure mutants --seeds 5 --seconds 20 --out mutants.json
python -m flashcheck.fuzz.measure groups --seconds 6 --out groups.json
python -m flashcheck.fuzz.measure campaign kernels:flash_attention --seconds 600 --out campaign.json
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import os
import platform
import statistics
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch

from flashcheck.devices import interpret_without_gpu
from flashcheck.fuzz.campaign import Budget, Campaign
from flashcheck.fuzz.files import write_json
from flashcheck.fuzz.group_counts import groups_of
from flashcheck.fuzz.hunter import CaseEvent, Found, Shard, hunt
from flashcheck.fuzz.runner import InProcessRunner
from flashcheck.fuzz.signature import Focus
from flashcheck.fuzz.store import Store
from flashcheck.loading import load
from flashcheck.mutants import MUTANTS


def machine(device: str) -> dict[str, str]:
    """Date, device and versions, for the head of every file."""
    import hypothesis

    name = torch.cuda.get_device_name() if device.startswith("cuda") else platform.processor()
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "device": f"{device} {name}".strip(),
        "cores": str(os.cpu_count()),
        "torch": torch.__version__,
        "hypothesis": hypothesis.__version__,
        "load": f"{os.getloadavg()[0]:.1f}",
    }


def campaign(
    kernel: str, device: str, seconds: float, workers: int, seed: int, folder: Path
) -> dict[str, Any]:
    """One campaign: cases/s, where the time goes, findings."""
    store = Store(folder / f"{kernel.replace(':', '-').replace('/', '-')}-{workers}")
    store.open(kernel, seed, resume=False)
    state = Campaign(kernel, device, store, seed, Budget(seconds=seconds), workers=workers).run()
    spent = dict(state.totals.seconds)
    in_kernel = spent.get("kernel", 0.0)
    return {
        "kernel": kernel,
        "workers": workers,
        "seed": seed,
        "cases": state.cases,
        "seconds": round(state.seconds, 1),
        "cases_per_second": round(state.cases / max(state.seconds, 1e-9), 3),
        "spent": {part: round(s, 2) for part, s in spent.items()},
        "outside_cases": round(max(0.0, workers * state.seconds - sum(spent.values())), 2),
        "judge_over_kernel": round(spent.get("judge", 0.0) / in_kernel, 2) if in_kernel else None,
        "worst_margin": {f"{d} {t}": m for (d, t), (m, _) in state.totals.worst.items()},
        "judge_faults": dict(state.totals.faults),
        "findings": [f.to_json() for f in state.findings],
    }


def cpu(kernel: str, seconds: float, seed: int) -> dict[str, Any]:
    """Cases per CPU second of one process, all dtypes in turn, and where the CPU time goes.

    Other work on the machine does not count. The first shard, which imports and compiles, is left out.
    """
    runner = InProcessRunner(load(kernel), clock=time.process_time)
    dtypes = runner.subject.capabilities.dtypes
    spent: defaultdict[str, float] = defaultdict(float)
    cases = 0

    def count(event: CaseEvent) -> None:
        nonlocal cases
        cases += 1
        for part, used in event.report.seconds.items():
            spent[part] += used

    hunt(Shard(0, seed, Focus(dtypes[0]), 16), runner, count)
    spent.clear()
    cases, number, started = 0, 0, time.process_time()
    while time.process_time() - started < seconds:
        number += 1
        shard = Shard(number, seed * 1000 + number, Focus(dtypes[number % len(dtypes)]), 40)
        hunt(shard, runner, count, lambda: time.process_time() - started >= seconds)
    whole = time.process_time() - started
    spent["kernel"] += spent.pop("first", 0.0)
    spent["generation"] = whole - sum(spent.values())
    return {
        "kernel": kernel,
        "seed": seed,
        "cases": cases,
        "cpu_seconds": round(whole, 1),
        "cases_per_cpu_second": round(cases / whole, 2),
        "share": {part: round(s / whole, 3) for part, s in spent.items()},
        "judge_over_kernel": round(spent["judge"] / spent["kernel"], 1) if spent["kernel"] else None,
    }


def time_to_failure(name: str, seed: int, seconds: float) -> dict[str, Any]:
    """Cases and CPU seconds until a mutant's first failure, dtypes in turn; and the size that it shrinks to.

    CPU seconds of this process, in which all of it runs: other work on the machine does not count.
    """
    runner = InProcessRunner(MUTANTS[name].make())
    started = time.process_time()
    judged = 0
    first: tuple[float, int] | None = None
    dtypes = runner.subject.capabilities.dtypes

    def count(event: CaseEvent) -> None:
        nonlocal judged, first
        judged += 1
        if event.group is not None and first is None:
            first = (time.process_time() - started, judged)

    def over() -> bool:
        spent = time.process_time() - started
        return spent > (seconds if first is None else first[0] + SHRINKING)

    found: list[Found] = []
    number = 0
    while not found and not over():
        shard = Shard(number, seed * 1000 + number, Focus(dtypes[number % len(dtypes)]), SHARD)
        found = hunt(shard, runner, count, over)
        number += 1
    if first is None:
        return {"found": False, "seconds": seconds, "cases": judged}
    smallest = min(found, key=lambda f: f.case.size)
    spec = smallest.case.spec
    return {
        "found": True,
        "seconds": round(first[0], 2),
        "cases": first[1],
        "check": found[0].group.check,
        "groups": len(found),
        "tokens": spec.num_queries + spec.num_keys,
        "heads": spec.batch * spec.num_heads,
    }


SHARD = 60
SHRINKING = 4.0
"""Cases a shard, and CPU seconds for shrinking after the first failure."""


def mutants(names: list[str], seeds: int, seconds: float, out: Path, result: dict[str, Any]) -> None:
    """Every mutant from every seed; medians over the seeds, inf where most found nothing.

    ``out`` is written after each mutant, and read first: what stands there is not measured again.
    """
    rows = _read(out)
    result["mutants"] = rows
    for name in names:
        if any(row["mutant"] == name for row in rows):
            continue
        runs = [time_to_failure(name, seed, seconds) for seed in range(1, seeds + 1)]
        hits = [r for r in runs if r["found"]]
        row: dict[str, Any] = {"mutant": name, "found": len(hits), "runs": runs}
        for field in ("seconds", "cases"):
            row[field] = statistics.median(r[field] if r["found"] else math.inf for r in runs)
        rows.append(row)
        result["summary"] = summary_of(rows, seconds)
        line = f"{name:32} {row['found']}/{len(runs)}  {row['seconds']:8.1f} s {row['cases']:6.0f} cases"
        print(line, flush=True)  # noqa: T201
        write_json(out, result)


def summary_of(rows: list[dict[str, Any]], seconds: float) -> dict[str, Any]:
    """Medians over the faults in ``rows``, each with ``seconds`` of CPU time a seed."""
    hits = [run for row in rows for run in row["runs"] if run["found"]]
    return {
        "mutants": len(rows),
        "cpu_seconds_allowed": seconds,
        "found": sum(row["seconds"] < math.inf for row in rows),
        "median_cpu_seconds": statistics.median(row["seconds"] for row in rows),
        "median_cases": statistics.median(row["cases"] for row in rows),
        "not_found": [row["mutant"] for row in rows if row["seconds"] == math.inf],
    } | {f"shrunk_{x}": statistics.median(r[x] for r in hits) for x in ("tokens", "heads") if hits}


def groups(names: list[str], seconds: float, seed: int, out: Path, result: dict[str, Any]) -> None:
    """Findings that one seeded fault makes; the file is written and read like that of ``mutants``."""
    rows = _read(out)
    result["mutants"] = rows
    for name in names:
        if not any(row["mutant"] == name for row in rows):
            rows.append(groups_of(name, seed, failures=12, draws=400, seconds=seconds))
            shown = [row["groups"] for row in rows if row["failures"]]
            result["summary"] = {
                "mutants": len(rows),
                "shown": len(shown),
                "median": statistics.median(shown) if shown else None,
                "worst": max(shown, default=None),
                "with": {str(n): shown.count(n) for n in sorted(set(shown))},
            }
            print(f"{name:32} {rows[-1]['groups']} of {rows[-1]['failures']} failures", flush=True)  # noqa: T201
            write_json(out, result)


def _read(out: Path) -> list[dict[str, Any]]:
    if not out.exists():
        return []
    rows: list[dict[str, Any]] = json.loads(out.read_text(encoding="utf-8"))["mutants"]
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("speed", "cpu", "mutants", "groups", "campaign"))
    parser.add_argument("names", nargs="*", help="kernels, or mutants (default: all)")
    parser.add_argument("--seconds", type=float, default=60.0, help="per campaign, or per mutant and seed")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--workers", type=int, nargs="+", default=[1, 2], help="of speed: each number is measured"
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, required=True)
    asked = parser.parse_intermixed_args()
    interpret_without_gpu()
    torch.set_num_threads(1)
    result: dict[str, Any] = {"what": asked.what, "machine": machine(asked.device)}
    if asked.what == "mutants":
        mutants(asked.names or list(MUTANTS), asked.seeds, asked.seconds, asked.out, result)
    elif asked.what == "groups":
        groups(asked.names or list(MUTANTS), asked.seconds, asked.seed, asked.out, result)
    elif asked.what == "cpu":
        result["kernels"] = []
        for kernel in asked.names:
            result["kernels"].append(cpu(kernel, asked.seconds, asked.seed))
            print(result["kernels"][-1], flush=True)  # noqa: T201
            write_json(asked.out, result)
    else:
        with tempfile.TemporaryDirectory() as folder:
            result["campaigns"] = []
            counts = asked.workers if asked.what == "speed" else asked.workers[:1]
            for kernel in asked.names:
                for workers in counts:
                    row = campaign(kernel, asked.device, asked.seconds, workers, asked.seed, Path(folder))
                    result["campaigns"].append(row)
                    print({k: row[k] for k in ("kernel", "workers", "cases_per_second", "spent")}, flush=True)  # noqa: T201
                    write_json(asked.out, result)  # after each: a campaign that dies takes no other with it


if __name__ == "__main__":
    main()
