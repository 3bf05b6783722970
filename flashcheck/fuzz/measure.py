"""Measures the fuzzer; every number of the documentation comes from here.

python -m flashcheck.fuzz.measure speed torch.sdpa.flash --seconds 60 --out speed.json
python -m flashcheck.fuzz.measure mutants --seeds 5 --seconds 60 --out mutants.json
python -m flashcheck.fuzz.measure campaign kernels:flash_attention --seconds 600 --out campaign.json
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from flashcheck.devices import interpret_without_gpu
from flashcheck.fuzz.campaign import Budget, Campaign
from flashcheck.fuzz.files import write_json
from flashcheck.fuzz.hunter import CaseEvent, Found, Shard, hunt
from flashcheck.fuzz.runner import InProcessRunner
from flashcheck.fuzz.signature import Focus
from flashcheck.fuzz.store import Store
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


def time_to_failure(name: str, seed: int, seconds: float) -> dict[str, Any]:
    """Cases and seconds until a mutant's first failure, dtypes in turn; and the size that it shrinks to."""
    runner = InProcessRunner(MUTANTS[name].make())
    started = time.monotonic()
    judged = 0
    first: tuple[float, int] | None = None
    dtypes = runner.subject.capabilities.dtypes

    def count(event: CaseEvent) -> None:
        nonlocal judged, first
        judged += 1
        if event.group is not None and first is None:
            first = (time.monotonic() - started, judged)

    found: list[Found] = []
    number = 0
    while not found and (left := seconds - (time.monotonic() - started)) > 0:
        shard = Shard(number, seed * 1000 + number, Focus(dtypes[number % len(dtypes)]), 60, seconds=left)
        found = hunt(shard, runner, count)
        number += 1
    if first is None:
        return {"found": False, "seconds": seconds, "cases": judged}
    spec = found[0].case.spec
    return {
        "found": True,
        "seconds": round(first[0], 2),
        "cases": first[1],
        "check": found[0].group.check,
        "groups": len(found),
        "tokens": spec.num_queries + spec.num_keys,
        "heads": spec.batch * spec.num_heads,
    }


def mutants(names: list[str], seeds: int, seconds: float) -> list[dict[str, Any]]:
    """Every mutant from every seed; medians over the seeds, inf where most found nothing."""
    rows = []
    for name in names:
        runs = [time_to_failure(name, seed, seconds) for seed in range(1, seeds + 1)]
        hits = [r for r in runs if r["found"]]
        row: dict[str, Any] = {"mutant": name, "found": f"{len(hits)}/{len(runs)}", "runs": runs}
        for field in ("seconds", "cases"):
            row[field] = statistics.median(r[field] if r["found"] else float("inf") for r in runs)
        if hits:
            row["tokens"] = statistics.median(r["tokens"] for r in hits)
            row["heads"] = statistics.median(r["heads"] for r in hits)
        rows.append(row)
        print(f"{name:32} {row['found']}  {row['seconds']:8.1f} s {row['cases']:6.0f} cases", flush=True)  # noqa: T201
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("speed", "mutants", "campaign"))
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
        result["mutants"] = mutants(asked.names or list(MUTANTS), asked.seeds, asked.seconds)
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
    write_json(asked.out, result)


if __name__ == "__main__":
    main()
