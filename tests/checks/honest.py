"""Counts false alarms: every check on honest kernels, over drawn problems.

    python -m tests.checks.honest --cases 20000 --json honest.json

Subjects: the emulator's presets, the attentions that others ship, and the kernels of this repository, each
with a share of the problems that its cost allows; those whose device is not here are named and left out.
Every problem meets all checks that judge results already made, every other one those of the backward, and one
or two of the checks that run the kernel again, those that judged least first: the table counts the verdicts
of each.

Deterministic in (seed, kernels): a run's case i is the same problem and the same checks every time. The file
is the state too: a run that was stopped, or asked for more cases, goes on where it ended. Exit code 1 for any
failure, 2 for a file of another run. No test: a full count takes an hour of one core.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from flashcheck import emulator
from flashcheck.adapters import BUILT_IN
from flashcheck.certify import one_thread
from flashcheck.checks import CHECKS, Judged, Record
from flashcheck.checks.bias import BiasTally
from flashcheck.checks.rms import RmsTally
from flashcheck.checks.score_tests import ScoreTally
from flashcheck.devices import choose_device, interpret_without_gpu
from flashcheck.errors import ArgumentError
from flashcheck.inputs.combinations import is_legal
from flashcheck.inputs.problems import Wishes, Without, draw_spec, families_for
from flashcheck.inputs.spec import ProblemSpec
from flashcheck.inputs.values import FAMILIES
from flashcheck.kernel import Kernel
from flashcheck.loading import load
from flashcheck.reruns import ALTERNATE, suits
from tests.long_run import LongRun, tally_from

SEED = 90210
OWN = (
    "kernels:flash_attention",
    "kernels:flash_attention_e4m3",
    "kernels:flash_attention_e5m2",
    "kernels:flash_decode",
    "kernels:score_fp16",
    "kernels:score_bf16",
    "kernels:score_tf32",
    "kernels:score_e4m3",
    "kernels:score_e5m2",
)
PARTS = dict.fromkeys(emulator.KERNELS, 10) | {
    "torch.sdpa.flash": 25,
    "torch.sdpa.math": 25,
    "torch.flex.eager": 15,
    "eager": 10,
    "jax.dot_product_attention": 2,
    "jax.pallas.mha": 2,
}
"""Share of each kernel in the cases, and ``RARE`` for one that is not named. JAX compiles every shape, and
Triton's interpreter takes seconds a problem."""
RARE = 1

PROCESS_EVERY = 400
"""One case in how many meets ``state.fresh_process``: a process costs seconds."""

SHORT = (1, 2, 7, 15, 16, 17, 31, 33, 48, 65)
FREE = 0.1
"""Share of the cases whose lengths are drawn as certify draws them; the others' are of ``SHORT``."""

NOTHING, PACKED = 0.03, 0.1
"""Shares of the attempts without queries or keys, and with packed sequences, where these are declared."""

_ATTEMPTS = 200
_TRIES = 8
"""Checks of the rotation that are tried on a problem until enough of them apply."""
_KEPT = 100

PROCESS = "state.fresh_process"
_SINGLE = [n for n, c in CHECKS.items() if not c.grouped and n not in ALTERNATE and n != PROCESS]
ALWAYS = tuple(n for n in _SINGLE if not CHECKS[n].reruns)
ROTATED = tuple(n for n in _SINGLE if CHECKS[n].reruns)
TALLIES: dict[str, type[RmsTally] | type[BiasTally] | type[ScoreTally]] = {
    "rms": RmsTally,
    "bias": BiasTally,
    "scale": ScoreTally,
    "cast": ScoreTally,
}


@dataclass
class Source:
    """What one kernel has met.

    Attributes:
        cases, seconds: problems, and process CPU time spent on them.
        checks: "check status" -> how often; times: check -> CPU seconds.
        failures: lines of failed checks and of faults of the judge; alarms: how many there were.
        groups: "dtype tensor tally" -> sums for the checks that judge groups of problems.
    """

    cases: int = 0
    seconds: float = 0.0
    checks: Counter[str] = field(default_factory=Counter)
    times: Counter[str] = field(default_factory=Counter)
    families: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    alarms: int = 0
    groups: dict[str, Any] = field(default_factory=dict)

    def fails(self, line: str) -> None:
        self.alarms += 1
        if len(self.failures) < _KEPT:
            self.failures.append(line[:2000])

    def tally(self, dtype: str, tensor: str, name: str) -> Any:
        return self.groups.setdefault(f"{dtype} {tensor} {name}", TALLIES[name]())

    def attention(self, check: str) -> float:
        """How much of it a check had: verdicts, and a little for every problem it did not apply to."""
        verdicts = sum(self.checks[f"{check} {status}"] for status in ("pass", "fail", "judge fault"))
        return verdicts + self.checks[f"{check} not applicable"] / 8

    def to_json(self) -> dict[str, Any]:
        data = {name: value for name, value in vars(self).items() if name != "groups"}
        data["times"] = {name: round(value, 3) for name, value in self.times.items()}
        return data | {"groups": {key: asdict(tally) for key, tally in self.groups.items()}}

    @staticmethod
    def from_json(data: dict[str, Any]) -> Source:
        kept = data.get("groups", {})  # a sum of runs has none
        groups = {key: tally_from(TALLIES[key.split()[-1]], value) for key, value in kept.items()}
        counters = {name: Counter(data[name]) for name in ("checks", "times", "families")}
        return Source(**{**data, **counters, "groups": groups})

    def verdicts(self) -> list[Record]:
        """Of the checks that judge groups."""
        records = []
        for key, tally in self.groups.items():
            dtype, tensor, name = key.split()
            records.append(tally.verdict(name if isinstance(tally, ScoreTally) else tensor, dtype))
        return records


def subjects(names: tuple[str, ...]) -> tuple[dict[str, tuple[Kernel, str]], dict[str, str]]:
    """Kernel and device by name, for those that can run here; and why the others cannot."""
    here: dict[str, tuple[Kernel, str]] = {}
    missing: dict[str, str] = {}
    for name in names:
        try:
            kernel = load(name)
            here[name] = kernel, choose_device(None, kernel)
        except (ArgumentError, ImportError, RuntimeError) as error:
            missing[name] = str(error)
            continue
        faults = kernel.self_test()
        if faults:
            del here[name]
            missing[name] = f"its self-test failed: {', '.join(faults)}"
    return here, missing


def legal_spec(rng: random.Random, kernel: Kernel, dtype: str, family: str) -> ProblemSpec | None:
    """A random spec that the declaration covers; None after many attempts."""
    capabilities = kernel.capabilities
    for _ in range(_ATTEMPTS):
        lengths = None if rng.random() < FREE else (rng.choice(SHORT), rng.choice(SHORT))
        if capabilities.zero_length and rng.random() < NOTHING:
            lengths = rng.choice([(17, 0), (0, 17), (0, 0)])
        packed = "cu_seqlens" in capabilities.options and rng.random() < PACKED
        without: Without | None = rng.choice((None, None, "queries", "keys")) if packed else None
        option = "cu_seqlens" if packed else None
        wishes = Wishes(family=family, lengths=lengths, option=option, without=without)
        spec = draw_spec(rng, capabilities, dtype, rng.randrange(2**31), wishes)
        if is_legal(spec, capabilities):
            return spec
    return None


class Run(LongRun):
    """The state of a run."""

    def __init__(
        self, kernels: dict[str, tuple[Kernel, str]], parts: dict[str, int], seed: int, path: Path | None
    ) -> None:
        self.kernels = kernels
        self.only: tuple[str, ...] = ()
        self.missing: dict[str, str] = {}
        self.sources = {name: Source() for name in kernels}
        super().__init__(parts, seed, path)

    def restore(self, data: dict[str, Any]) -> None:
        """The sources of an earlier part of the run."""
        self.sources = {name: Source.from_json(source) for name, source in data["sources"].items()}

    def state(self) -> dict[str, Any]:
        """The sources, and sums over them."""
        return {
            "not here": self.missing,
            "alarms": self.alarms,
            "checks": dict(sorted(self.checks.items())),
            "sources": {name: source.to_json() for name, source in self.sources.items()},
        }

    def fault(self, number: int, words: str) -> None:
        """Counts as an alarm."""
        self.sources[self.order[number % len(self.order)]].fails(f"case {number}: {words}")

    def worst(self) -> str:
        """How many alarms."""
        return f"{self.alarms} alarms"

    @property
    def checks(self) -> Counter[str]:
        return sum((source.checks for source in self.sources.values()), Counter())

    @property
    def alarms(self) -> int:
        groups = [r for source in self.sources.values() for r in source.verdicts() if r.failed]
        return sum(source.alarms for source in self.sources.values()) + len(groups)

    def case(self, number: int) -> None:
        """Judges case ``number``: its kernel, a problem drawn for it, and the checks whose turn it is."""
        round_, slot = divmod(number, len(self.order))
        name = self.order[slot]
        kernel, device = self.kernels[name]
        source = self.sources[name]
        rng = random.Random(f"{self.seed}/{number}")
        families = families_for(kernel.capabilities)
        family = families[(number * 7 + round_) % len(families)]
        spec = legal_spec(rng, kernel, rng.choice(kernel.capabilities.dtypes), family)
        if spec is None:
            source.fails(f"case {number}: no legal problem was found")
            return
        source.cases += 1
        source.families[spec.family] += 1
        started = time.process_time()
        judged = Judged(kernel, spec.build(), device)
        turn = source.cases
        for check in ALWAYS + (ALTERNATE if turn % 2 else ()):
            self._make(number, check, judged, spec, source)
        self._rotate(number, turn, judged, spec, source)
        if number % PROCESS_EVERY == PROCESS_EVERY - 1:
            self._make(number, PROCESS, judged, spec, source)
        self._group(judged, spec, source, backward=bool(turn % 2))
        source.seconds += time.process_time() - started

    def _rotate(self, number: int, turn: int, judged: Judged, spec: ProblemSpec, source: Source) -> None:
        """One of the checks that run the kernel again, on every third problem two: those with the fewest
        verdicts on this kernel, and of these the ones that were tried least."""
        wanted = 2 if turn % 3 == 0 else 1
        for check in sorted(ROTATED, key=source.attention)[:_TRIES]:
            if check == "influence.backward" and not suits(check, spec):
                continue
            wanted -= self._make(number, check, judged, spec, source) != "not applicable"
            if not wanted:
                return

    def _make(self, number: int, name: str, judged: Judged, spec: ProblemSpec, source: Source) -> str:
        if self.only and name not in self.only:
            return "not applicable"
        started = time.process_time()
        try:
            record = CHECKS[name].on(judged)
            status = str(record.status)
            if record.failed:
                source.fails(f"case {number} {name}: {record.message}\n    {json.dumps(spec.to_json())}")
        except Exception as error:  # a fault of the judge: no verdict, and no better than a false alarm
            status = "judge fault"
            source.fails(f"case {number} {name}: JUDGE {error!r}\n    {json.dumps(spec.to_json())}")
        source.times[name] += time.process_time() - started
        source.checks[f"{name} {status}"] += 1
        return status

    def _group(self, judged: Judged, spec: ProblemSpec, source: Source, backward: bool) -> None:
        ordinary = "ordinary" in FAMILIES[spec.family].properties and spec.gradient == "normal"
        if not ordinary or not judged.answers() or self.only:
            return
        try:
            measured = dict(judged.measured)
            if backward and judged.kernel.backward and judged.backward_defined and judged.differentiates():
                measured |= judged.measured_gradients
            for tensor in ("O", "dQ", "dK", "dV"):
                if tensor in measured and measured[tensor].gates:
                    for name in ("rms", "bias"):
                        source.tally(spec.dtype, tensor, name).add(measured[tensor])
            if judged.bound.out.prediction_gates:
                for name, sums in judged.score_sums.items():
                    source.tally(spec.dtype, "O", name).add(sums)
        except Exception as error:
            source.fails(f"groups: JUDGE {error!r}\n    {json.dumps(spec.to_json())}")

    def table(self) -> str:
        """Cases per second by source, verdicts and cost by check, and every failure kept."""
        out = [f"{'source':<28}{'cases':>8}{'cases/s':>9}{'verdicts':>10}{'alarms':>8}"]
        for name, s in self.sources.items():
            verdicts = sum(n for key, n in s.checks.items() if not key.endswith("not applicable"))
            rate = s.cases / s.seconds if s.seconds else 0.0
            out.append(f"{name:<28}{s.cases:>8,}{rate:>9.2f}{verdicts:>10,}{s.alarms:>8}")
        out += ["", f"{'check':<32}{'pass':>8}{'fail':>6}{'n/a':>8}{'ms each':>9}"]
        times = sum((source.times for source in self.sources.values()), Counter())
        for name in CHECKS:
            passes, fails, none = (self.checks[f"{name} {s}"] for s in ("pass", "fail", "not applicable"))
            fails += self.checks[f"{name} judge fault"]
            if passes + fails + none:
                cost = 1e3 * times[name] / (passes + fails + none)
                out.append(f"{name:<32}{passes:>8,}{fails:>6,}{none:>8,}{cost:>9.1f}")
        out.append("")
        for name, source in self.sources.items():
            out += [f"{name} {line}" for line in source.failures]
            out += [f"{name} {r.check}: {r.message}" for r in source.verdicts() if r.failed]
        judged = [r for source in self.sources.values() for r in source.verdicts()]
        groups = Counter(f"{r.check} {r.status}" for r in judged)
        out += [f"groups: {', '.join(f'{key} {n}' for key, n in sorted(groups.items()))}", ""]
        out += [f"{name}: not here: {why}" for name, why in self.missing.items()]
        out.append(
            f"{self.alarms} false alarms in {self.done:,} problems; {self.seconds:,.0f} s of CPU time, "
            f"{self.wall:,.0f} s"
        )
        return "\n".join(out)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", type=int, default=1000, help="problems over all kernels together")
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--kernel", action="append", help="only this one (repeatable); equal shares")
    parser.add_argument("--check", action="append", help="only this check (repeatable)")
    parser.add_argument("--json", type=Path, help="the state, read and written")
    arguments = parser.parse_args()
    interpret_without_gpu()
    kernels, missing = subjects(tuple(arguments.kernel or (*BUILT_IN, *OWN)))
    for name, why in missing.items():
        print(f"{name}: not here: {why}", flush=True)
    parts = {name: 1 if arguments.kernel else PARTS.get(name, RARE) for name in kernels}
    run = Run(kernels, parts, arguments.seed, arguments.json)
    run.only, run.missing = tuple(arguments.check or ()), missing
    with one_thread():
        run.go(arguments.cases)
    print(run.table())
    return 1 if run.alarms else 0


if __name__ == "__main__":
    sys.exit(main())
