"""Measures the fuzzer; every number of the documentation comes from here.

python -m flashcheck.fuzz.measure rate torch.sdpa.flash --workers 1 2 --seconds 60 --out rate.json
python -m flashcheck.fuzz.measure rate kernels:flash_attention --passes forward backward --largest 512 \
    --signatures 6 --workers 12 --seconds 40 --out rate.json
python -m flashcheck.fuzz.measure cpu torch.sdpa.flash --seconds 30 --out cpu.json
python -m flashcheck.fuzz.measure mutants --seeds 5 --seconds 20 --jobs 2 --out mutants.json
python -m flashcheck.fuzz.measure groups --seconds 6 --out groups.json
python -m flashcheck.fuzz.measure campaign kernels:flash_attention --seconds 600 --out campaign.json

`mutants` and `groups` go on where they were stopped, when called again.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any, get_args

import torch

from flashcheck.devices import interpret_without_gpu
from flashcheck.errors import ArgumentError
from flashcheck.fuzz.campaign import Budget, Campaign
from flashcheck.fuzz.files import write_json
from flashcheck.fuzz.group_counts import groups_of
from flashcheck.fuzz.hunter import CaseEvent, Passes, Shard, hunt
from flashcheck.fuzz.rate import rate, told
from flashcheck.fuzz.runner import InProcessRunner
from flashcheck.fuzz.signature import Focus
from flashcheck.fuzz.store import Store
from flashcheck.fuzz.time_to_failure import measure_mutants
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
    kernel: str,
    device: str,
    seconds: float,
    workers: int,
    seed: int,
    folder: Path,
    ahead: int | None = None,
) -> dict[str, Any]:
    """One campaign: cases/s, where the time goes, findings. ``ahead``: as of a Campaign."""
    store = Store(folder / f"{kernel.replace(':', '-').replace('/', '-')}-{workers}")
    store.open(kernel, seed, resume=False)
    budget = Budget(seconds=seconds)
    state = Campaign(kernel, device, store, seed, budget, workers=workers, ahead=ahead).run()
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


def main() -> int:
    """0; 2 for a wrong argument, 130 where Ctrl-C ended it."""
    asked = _parser().parse_intermixed_args()
    interpret_without_gpu()
    torch.set_num_threads(1)
    try:
        MODES[asked.what](asked, {"what": asked.what, "machine": machine(asked.device)})
    except ArgumentError as error:
        print(error)  # noqa: T201
        return 2
    except KeyboardInterrupt:
        print("stopped; what was measured is in the file")  # noqa: T201
        return 130
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=tuple(MODES))
    parser.add_argument("names", nargs="*", help="kernels, or mutants (default: all)")
    parser.add_argument("--seconds", type=float, default=60.0, help="per campaign, or per mutant and seed")
    parser.add_argument("--seeds", type=int, default=5, help="of mutants")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--workers", type=int, nargs="+", default=[1], help="of rate: each is measured")
    parser.add_argument("--jobs", type=int, default=1, help="of mutants: processes")
    parser.add_argument(
        "--passes", nargs="+", choices=get_args(Passes), default=["both"], help="of rate: each is measured"
    )
    parser.add_argument("--largest", type=int, default=129, help="of rate: length of a sequence")
    parser.add_argument(
        "--signatures", type=int, default=0, help="of rate: that a compiled kernel keeps to; 0: all"
    )
    parser.add_argument("--ahead", type=int, help="of campaign: processes that compile ahead (default: some)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, required=True)
    return parser


def _rates(asked: argparse.Namespace, result: dict[str, Any]) -> None:
    result["rates"] = []
    for kernel, passes, workers in itertools.product(asked.names, asked.passes, asked.workers):
        row = rate(
            kernel,
            asked.device,
            workers=workers,
            seconds=asked.seconds,
            seed=asked.seed,
            passes=passes,
            largest=asked.largest,
            signatures=asked.signatures,
        )
        result["rates"].append(row)
        print(told(row), flush=True)  # noqa: T201
        write_json(asked.out, result)  # after each: one that dies takes no other with it


def _campaigns(asked: argparse.Namespace, result: dict[str, Any]) -> None:
    result["campaigns"] = []
    with tempfile.TemporaryDirectory() as folder:
        for kernel in asked.names:
            settings = (asked.device, asked.seconds, asked.workers[0], asked.seed)
            row = campaign(kernel, *settings, Path(folder), asked.ahead)
            result["campaigns"].append(row)
            print({k: row[k] for k in ("kernel", "workers", "cases_per_second", "spent")}, flush=True)  # noqa: T201
            write_json(asked.out, result)


def _cpu(asked: argparse.Namespace, result: dict[str, Any]) -> None:
    result["kernels"] = []
    for kernel in asked.names:
        result["kernels"].append(cpu(kernel, asked.seconds, asked.seed))
        print(result["kernels"][-1], flush=True)  # noqa: T201
        write_json(asked.out, result)


def _mutants(asked: argparse.Namespace, result: dict[str, Any]) -> None:
    names = asked.names or list(MUTANTS)
    measure_mutants(names, asked.seeds, asked.seconds, asked.out, result, asked.jobs)


def _groups(asked: argparse.Namespace, result: dict[str, Any]) -> None:
    groups(asked.names or list(MUTANTS), asked.seconds, asked.seed, asked.out, result)


MODES = {"rate": _rates, "cpu": _cpu, "mutants": _mutants, "groups": _groups, "campaign": _campaigns}


if __name__ == "__main__":
    sys.exit(main())
