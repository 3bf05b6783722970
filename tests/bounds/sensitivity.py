"""How small a loss of precision do the rms ratio and the score tests reject, with no false alarm?

    python -m tests.bounds.sensitivity --honest 2000 --json sensitivity.json

An honest run is a group of problems with ordinary values, judged as ``certify`` judges a dtype: it must
pass. Then P, in groups of the same problems, is rounded once more, in ever finer formats, or the scale is
off by ever less; for each the share of groups that are rejected is printed.
"""

import argparse
import json
import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path

import torch
from torch import Tensor

from flashcheck import emulator
from flashcheck.arithmetic import ARITHMETICS, HOPPER, IEEE, Arithmetic
from flashcheck.checks import Judged
from flashcheck.checks.rms import RmsTally
from flashcheck.checks.score_tests import ScoreTally
from flashcheck.formats import Format, round_nearest, round_toward_zero
from flashcheck.kernel import ForwardResult, Kernel
from flashcheck.mutants.exposing import draw
from flashcheck.problem import Problem
from flashcheck.report.build import versions

emulated = import_module("flashcheck.emulator.forward")  # the package exports a function of that name
DIRECTIONS = ("scale", "cast")


@dataclass(frozen=True, slots=True)
class Fault:
    """A loss of precision: what happens to P before it is rounded, or to the scale."""

    name: str
    before: Callable[[Tensor, Format], Tensor] | None = None
    scale: float = 0.0


def shifted_rounding(extra_bits: int) -> Callable[[Tensor, Format], Tensor]:
    """One more rounding of P, on a shifted grid of ``extra_bits`` more bits than P's format."""

    def once_more(x: Tensor, fmt: Format) -> Tensor:
        finer = replace(fmt, precision=fmt.precision + extra_bits)
        return (round_nearest(x.double() * 0.7, finer) / 0.7).float()

    return once_more


FAULTS = (
    Fault("none"),
    Fault("P rounded once more, same precision", shifted_rounding(0)),
    Fault("P rounded once more, 1 bit finer", shifted_rounding(1)),
    Fault("P rounded once more, 2 bits finer", shifted_rounding(2)),
    Fault("P truncated", lambda x, fmt: round_toward_zero(x.double(), fmt).float()),
    Fault("scale off by 1e-4", scale=1e-4),
    Fault("scale off by 7e-5", scale=7e-5),
    Fault("scale off by 3e-5", scale=3e-5),
)


@dataclass(slots=True)
class Group:
    """One run: the tallies of a dtype."""

    rms: RmsTally = field(default_factory=RmsTally)
    scores: dict[str, ScoreTally] = field(
        default_factory=lambda: {n: ScoreTally() for n in ("scale", "cast")}
    )

    def add(self, judged: Judged) -> None:
        measured = judged.measured["O"]
        if measured.gates:
            self.rms.add(measured)
            for name, sums in judged.score_sums.items():
                self.scores[name].add(sums)

    def rejected_by(self) -> tuple[str, ...]:
        records = [self.rms.verdict("O"), *(t.verdict(n, "") for n, t in self.scores.items())]
        return tuple(record.check for record in records if record.failed)


def faulty(kernel: Kernel, declared: Arithmetic, fault: Fault) -> Kernel:
    """The emulated kernel with the fault, its tiling undeclared."""

    def forward(problem: Problem) -> ForwardResult:
        if fault.scale:
            problem = problem.replaced(scale=problem.effective_scale * (1 + fault.scale))
        if fault.before is None:
            return kernel.forward(problem)
        plain, before = emulated.round_to, fault.before
        narrow = declared.probability_format
        emulated.round_to = lambda x, fmt: plain(before(x, fmt) if fmt is narrow else x, fmt)
        try:
            return kernel.forward(problem)
        finally:
            emulated.round_to = plain

    return replace(kernel, forward=forward, arithmetic=lambda _: declared)


def problems(fmt: Format, seed: int, count: int) -> list[Problem]:
    """A group: ordinary values, lengths and dims as they come."""
    rng = random.Random(seed)
    return [
        draw(
            fmt,
            heads=(2, 2),
            lengths=(rng.choice((16, 33, 48)), rng.choice((64, 96, 160))),
            dims=(d := rng.choice((16, 32, 64)), d),
            seed=rng.randrange(2**31),
        )
        for _ in range(count)
    ]


def study(preset: str, honest: int, faults: int, size: int, state: dict, save: Callable[[], None]) -> None:
    """Fills ``state`` for one preset: fault -> {runs, rejected, by check}; goes on where it stands."""
    declared = ARITHMETICS[preset]
    for fault in FAULTS:
        found = state.setdefault(fault.name, {"runs": 0, "rejected": 0, "by": {}, "ratios": []})
        wanted = honest if fault.name == "none" else faults
        while found["runs"] < wanted:
            number = found["runs"]
            machine = HOPPER if number % 4 == 3 else IEEE
            kernel = faulty(emulator.as_kernel(declared, machine, name=preset), declared, fault)
            group = Group()
            for problem in problems(declared.input_format, number, size):
                group.add(Judged(kernel, problem))
            rejected = group.rejected_by()
            found["runs"] += 1
            found["rejected"] += bool(rejected)
            for check in rejected:
                found["by"][check] = found["by"].get(check, 0) + 1
            if len(found["ratios"]) < 50:
                found["ratios"].append(group.rms.ratio)
            if number % 20 == 19:
                save()
        save()


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--honest", type=int, default=2000, help="honest runs per preset")
    parser.add_argument("--faults", type=int, default=20, help="runs per fault")
    parser.add_argument("--size", type=int, default=8, help="problems of a run")
    parser.add_argument("--presets", nargs="*", default=["flash.bf16", "flash.fp16"])
    parser.add_argument("--json", type=Path)
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    state = {"versions": versions(), "size": given.size, "presets": {}}
    if given.json is not None and given.json.exists():
        state = json.loads(given.json.read_text())
        if state["versions"] != versions() or state["size"] != given.size:
            sys.exit(f"{given.json} is of other versions or sizes: give another --json")

    def save() -> None:
        state["date"] = time.strftime("%Y-%m-%dT%H:%M:%S%z")
        if given.json is not None:
            temporary = given.json.with_name(f".{given.json.name}.tmp")
            temporary.write_text(json.dumps(state, indent=1))
            temporary.replace(given.json)

    false_alarms = 0
    for preset in given.presets:
        found = state["presets"].setdefault(preset, {})
        study(preset, given.honest, given.faults, given.size, found, save)
        false_alarms += found["none"]["rejected"]
        for name, x in found.items():
            by = ", ".join(f"{check} {count}" for check, count in sorted(x["by"].items()))
            print(f"{preset:<12} {name:<38} rejected {x['rejected']:>5} of {x['runs']:<5} {by}", flush=True)
    return 1 if false_alarms else 0


if __name__ == "__main__":
    sys.exit(main())
