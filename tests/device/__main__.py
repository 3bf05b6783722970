"""Runs what is wanted from a GPU machine, side by side, within a time limit.

    python -m tests.device probe certificate edges --seconds 560 --folder out --archive out.tar.gz
    python -m tests.device --list certificate
    python -m tests.device probe certificate honest --device cpu --limit 20 --seconds 120 --slots 2

The folder holds a log and a file for each job, and summary.json; ``tests.device.merge`` puts shards together.
"""

from __future__ import annotations

import argparse
import fnmatch
import os
import sys
import time
from pathlib import Path

from tests.device.found import last_line, verdict
from tests.device.jobs import KINDS, Plan, jobs_of
from tests.device.run import Runner


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("kinds", nargs="+", choices=list(KINDS), help="in order of importance")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--only", action="append", default=[], help="jobs whose names match (repeatable)")
    parser.add_argument("--without", action="append", default=[], help="less those (repeatable)")
    parser.add_argument("--level", default="standard", help="of the certificates")
    parser.add_argument("--round", type=int, default=0, help="other rounds draw other problems")
    parser.add_argument("--fuzz-seconds", type=float, default=240.0, help="of each campaign")
    parser.add_argument("--certify-seconds", type=float, help="a certificate judges no problem after so many")
    parser.add_argument("--shards", type=int, default=8, help="processes of honest on torch's kernels")
    parser.add_argument("--slots", type=int, default=os.cpu_count() or 1, help="cores to keep busy")
    parser.add_argument("--seconds", type=float, default=560.0, help="after which everything has ended")
    parser.add_argument("--limit", type=float, help="seconds for each job, where its own limit is longer")
    parser.add_argument("--folder", type=Path, default=Path("device-run"))
    parser.add_argument("--archive", type=Path)
    parser.add_argument("--cache", type=Path, help="of compilers; default: beside the folder")
    parser.add_argument("--list", action="store_true", help="show the jobs and run nothing")
    given = parser.parse_args()
    sizes = (given.round, given.fuzz_seconds, given.shards, given.certify_seconds)
    plan = Plan(given.device, given.level, *sizes)
    jobs = [job for job in jobs_of(given.kinds, plan) if _wanted(job.name, given.only, given.without)]
    if given.list:
        for job in jobs:
            print(job.name, "" if not job.on_cpu else "(no GPU)", *job.arguments)
        return 0
    given.folder.mkdir(parents=True, exist_ok=True)
    cache = given.cache or given.folder.with_name(given.folder.name + ".cache")
    started = time.monotonic()

    def say(line: str) -> None:
        print(f"{time.monotonic() - started:6.0f} {line}", flush=True)

    folder = given.folder.resolve()
    run = Runner(
        jobs,
        folder,
        given.archive,
        cache.resolve(),
        given.slots,
        given.seconds,
        given.limit,
        verdict=verdict,
        say=say,
    )
    outcomes = run.go()
    print()
    for outcome in outcomes.values():
        print(run.line(outcome))
        if outcome.code not in (0, None) and not (folder / f"{outcome.job.name}.json").exists():
            print("    " + last_line(folder / f"{outcome.job.name}.log"))
    return 0


def _wanted(name: str, only: list[str], without: list[str]) -> bool:
    def matches(patterns: list[str]) -> bool:
        return any(fnmatch.fnmatch(name, pattern) for pattern in patterns)

    return (not only or matches(only)) and not matches(without)


if __name__ == "__main__":
    sys.exit(main())
