"""Counts false alarms: ``python -m tests.checks.honest --cases N`` runs every check on honest kernels.

Subjects: the emulator's presets, torch's SDPA back ends on the CPU, flex_attention where it can be imported,
and the kernels of this repository. Problems are drawn at random, every check runs on each; any failure is
printed with its spec, and the exit code is 1. No test: a full count takes hours.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections import Counter

from flashcheck.adapters import BUILT_IN
from flashcheck.certify import one_thread
from flashcheck.checks import CHECKS, Judged
from flashcheck.checks.bias import BiasTally
from flashcheck.checks.rms import RmsTally
from flashcheck.devices import interpret_without_gpu
from flashcheck.errors import ArgumentError
from flashcheck.inputs.problems import draw_spec
from flashcheck.inputs.spec import ProblemSpec
from flashcheck.inputs.values import FAMILIES
from flashcheck.kernel import Capabilities, Kernel
from flashcheck.loading import load

OWN = ("kernels:flash_attention",)
SLOW = {"state.fresh_process": 200}
"""Made on every n-th problem only: a process costs seconds."""


def legal_spec(rng: random.Random, capabilities: Capabilities, dtype: str) -> ProblemSpec | None:
    """A random spec that the declaration covers; None after many attempts."""
    for _ in range(200):
        spec = draw_spec(rng, capabilities, dtype, rng.randrange(2**31))
        rows = capabilities.empty_rows or not spec.leaves_rows()
        if rows and capabilities.refuses(spec.outline()) is None:
            return spec
    return None


def count(kernel: Kernel, cases: int, seed: int, names: tuple[str, ...]) -> tuple[Counter[str], list[str]]:
    """Verdict counts of ``cases`` problems, spread over the dtypes, and the lines of all failures."""
    counts: Counter[str] = Counter()
    failures: list[str] = []
    tallies: dict[tuple[str, str], tuple[RmsTally, BiasTally]] = {}
    rng = random.Random(f"{seed}/{kernel.name}")
    dtypes = kernel.capabilities.dtypes
    for number in range(cases):
        spec = legal_spec(rng, kernel.capabilities, dtypes[number % len(dtypes)])
        if spec is None:
            failures.append(f"{kernel.name}: no legal problem was found")
            break
        judged = Judged(kernel, spec.build())
        for name in names:
            if number % SLOW.get(name, 1):
                continue
            try:
                record = CHECKS[name].on(judged)
            except Exception as error:  # a fault of the judge: no verdict, and no better than a false alarm
                failures.append(f"{kernel.name} {name}: JUDGE {error!r}\n    {spec.to_json()}")
                continue
            counts[f"{name} {record.status}"] += 1
            if record.failed and not CHECKS[name].grouped:
                failures.append(f"{kernel.name} {name}: {record.message}\n    {spec.to_json()}")
        ordinary = "ordinary" in FAMILIES[spec.family].properties and spec.gradient == "normal"
        if ordinary and judged.answers():
            measured = dict(judged.measured)
            if kernel.backward is not None and judged.backward_defined and judged.differentiates():
                measured |= judged.measured_gradients
            for tensor in ("O", "dQ", "dK", "dV"):
                if tensor in measured and measured[tensor].gates:
                    both = tallies.setdefault((spec.dtype, tensor), (RmsTally(), BiasTally()))
                    for tally in both:
                        tally.add(measured[tensor])
    for (dtype, tensor), both in tallies.items():
        for tally in both:
            verdict = tally.verdict(tensor)
            counts[f"{verdict.check} group {verdict.status}"] += 1
            if verdict.failed:
                failures.append(f"{kernel.name} {dtype} {verdict.message}")
    return counts, failures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=100, help="problems over all kernels together")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kernel", action="append", help="only this one (repeatable)")
    parser.add_argument("--check", action="append", help="only this check (repeatable)")
    arguments = parser.parse_args()
    interpret_without_gpu()
    names = tuple(arguments.kernel or (*BUILT_IN, *OWN))
    checks = tuple(arguments.check or (n for n, c in CHECKS.items() if not c.grouped))
    kernels = []
    for name in names:
        try:
            kernels.append(load(name))
        except (ArgumentError, ImportError, RuntimeError) as error:
            print(f"{name}: cannot run here: {error}")
    share = -(-arguments.cases // max(len(kernels), 1))
    alarms = 0
    with one_thread():
        for kernel in kernels:
            started = time.perf_counter()
            counts, failures = count(kernel, share, arguments.seed, checks)
            seconds = time.perf_counter() - started
            passed = sum(n for key, n in counts.items() if key.endswith(" pass"))
            print(
                f"{kernel.name}: {share} problems, {passed} passes, {len(failures)} failures, "
                f"{share / seconds:.2f} problems/s",
                flush=True,
            )
            for line in failures[:20]:
                print("  " + line, flush=True)
            alarms += len(failures)
    print(f"{alarms} false alarms in {share * len(kernels)} problems")
    return 1 if alarms else 0


if __name__ == "__main__":
    sys.exit(main())
