"""How soon a hunt finds each seeded fault, from several seeds; and the size that the failure shrinks to."""

from __future__ import annotations

import json
import math
import multiprocessing
import signal
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from flashcheck.errors import ArgumentError
from flashcheck.fuzz.files import write_json
from flashcheck.fuzz.hunter import CaseEvent, Found, Shard, hunt
from flashcheck.fuzz.runner import InProcessRunner
from flashcheck.fuzz.signature import Focus
from flashcheck.mutants import MUTANTS

SHARD = 60
SHRINKING = 4.0
"""Cases a shard, and CPU seconds for shrinking after the first failure."""


def time_to_failure(name: str, seed: int, seconds: float) -> dict[str, Any]:
    """Cases and CPU seconds until a mutant's first failure, dtypes in turn; and the size that it shrinks to.

    CPU seconds of this process, in which all of it runs: other work on the machine does not count.
    ``in_kernel`` and ``in_judge`` are those of all cases, shrinking included.
    """
    runner = InProcessRunner(MUTANTS[name].make(), clock=time.process_time)
    started = time.process_time()
    judged = 0
    first: tuple[float, int] | None = None
    spent: defaultdict[str, float] = defaultdict(float)
    dtypes = runner.subject.capabilities.dtypes

    def count(event: CaseEvent) -> None:
        nonlocal judged, first
        judged += 1
        for part, used in event.report.seconds.items():
            spent["in_judge" if part == "judge" else "in_kernel"] += used if part != "build" else 0.0
        if event.group is not None and first is None:
            first = (time.process_time() - started, judged)

    def over() -> bool:
        used = time.process_time() - started
        return used > (seconds if first is None else first[0] + SHRINKING)

    found: list[Found] = []
    number = 0
    while not found and not over():
        shard = Shard(number, seed * 1000 + number, Focus(dtypes[number % len(dtypes)]), SHARD)
        found = hunt(shard, runner, count, over)
        number += 1
    parts = {part: round(used, 3) for part, used in spent.items()}
    if first is None:
        return {"seed": seed, "found": False, "seconds": seconds, "cases": judged, **parts}
    smallest = min(found, key=lambda f: f.case.size)
    spec = smallest.case.spec
    return {
        "seed": seed,
        "found": True,
        "seconds": round(first[0], 2),
        "cases": first[1],
        "check": found[0].group.check,
        "groups": len(found),
        "tokens": spec.num_queries + spec.num_keys,
        "heads": spec.batch * spec.num_heads,
        **parts,
    }


def measure_mutants(
    names: Sequence[str],
    seeds: int,
    seconds: float,
    out: Path,
    head: dict[str, Any],
    jobs: int = 1,
    say: Callable[[str], None] = print,
) -> dict[str, Any]:
    """Every mutant from every seed, in ``jobs`` processes; what ``out`` holds in the end.

    The file is the state too: it is written after every seed and read first, so that a measurement that was
    stopped goes on. Raises ArgumentError for a file of another measurement. KeyboardInterrupt ends it.
    """
    known = _read(out, seeds, seconds)
    wanted = [(name, seed) for name in names for seed in range(1, seeds + 1)]
    left = [pair for pair in wanted if pair not in known]
    say(f"{len(wanted)} runs of at most {seconds:g} CPU seconds, {len(wanted) - len(left)} done before")
    started = time.monotonic()
    result = _result(head, names, seeds, seconds, known)
    context = multiprocessing.get_context("spawn")
    with context.Pool(min(jobs, max(1, len(left))), _alone) as pool:  # left at once when it is interrupted
        runs = pool.imap_unordered(_measured, [(name, seed, seconds) for name, seed in left])
        for done, (name, seed, run) in enumerate(runs, 1):
            known[name, seed] = run
            result = _result(head, names, seeds, seconds, known)
            write_json(out, result)
            rest = (time.monotonic() - started) / done * (len(left) - done)
            say(f"{len(known):4} of {len(wanted)}, {rest / 60:3.0f} min left  {name} {seed}: {_told(run)}")
    return result


def _alone() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # whoever started this decides when to stop
    torch.set_num_threads(1)


def _measured(asked: tuple[str, int, float]) -> tuple[str, int, dict[str, Any]]:
    name, seed, seconds = asked
    return name, seed, time_to_failure(name, seed, seconds)


def _told(run: dict[str, Any]) -> str:
    if not run["found"]:
        return f"not found in {run['cases']} cases"
    small = f"{run['tokens']} tokens, {run['heads']} heads"
    return f"{run['seconds']:5.1f} s, case {run['cases']}, {run['check']}, shrunk to {small}"


def _result(
    head: dict[str, Any],
    names: Sequence[str],
    seeds: int,
    seconds: float,
    known: dict[tuple[str, int], dict[str, Any]],
) -> dict[str, Any]:
    """Rows of the mutants whose seeds are all there, their summary, and what is not complete yet."""
    rows, unfinished = [], []
    for name in dict.fromkeys((*(name for name, _ in known), *names)):
        runs = [known[name, seed] for seed in range(1, seeds + 1) if (name, seed) in known]
        row: dict[str, Any] = {"mutant": name, "found": sum(r["found"] for r in runs), "runs": runs}
        if len(runs) < seeds:
            unfinished += [row] if runs else []
            continue
        for field in ("seconds", "cases"):
            row[field] = statistics.median(r[field] if r["found"] else math.inf for r in runs)
        rows.append(row)
    asked = {"seeds": seeds, "cpu_seconds": seconds}
    result = {**head, "asked": asked, "mutants": rows, "unfinished": unfinished}
    return result | ({"summary": summary_of(rows, seconds)} if rows else {})


def _read(out: Path, seeds: int, seconds: float) -> dict[tuple[str, int], dict[str, Any]]:
    if not out.exists():
        return {}
    data = json.loads(out.read_text(encoding="utf-8"))
    asked = {"seeds": seeds, "cpu_seconds": seconds}
    if data.get("asked") != asked:
        raise ArgumentError("--out", str(out), f"no file, or that of a measurement of {asked}")
    rows = [*data["mutants"], *data["unfinished"]]
    return {(row["mutant"], run["seed"]): run for row in rows for run in row["runs"]}


def summary_of(rows: list[dict[str, Any]], seconds: float) -> dict[str, Any]:
    """Medians over the faults in ``rows``, each with ``seconds`` of CPU time a seed.

    ``judge_over_kernel``: what the judge takes for each second of the kernel, over all runs.
    """
    runs = [run for row in rows for run in row["runs"]]
    hits = [run for run in runs if run["found"]]
    in_kernel, in_judge = (sum(run.get(part, 0.0) for run in runs) for part in ("in_kernel", "in_judge"))
    return {
        "mutants": len(rows),
        "cpu_seconds_allowed": seconds,
        "found": sum(row["seconds"] < math.inf for row in rows),
        "median_cpu_seconds": statistics.median(row["seconds"] for row in rows),
        "median_cases": statistics.median(row["cases"] for row in rows),
        "not_found": [row["mutant"] for row in rows if row["seconds"] == math.inf],
        "judge_over_kernel": round(in_judge / in_kernel, 1) if in_kernel else None,
    } | {f"shrunk_{x}": statistics.median(r[x] for r in hits) for x in ("tokens", "heads") if hits}
