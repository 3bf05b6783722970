"""Soundness run: many drawn problems, many honest kernels; no margin may exceed 1.

    python -m tests.bounds.soundness --cases 20000 --json soundness.json

A kernel runs on the first device that it declares and that is here, a GPU before the CPU.
Deterministic in (seed, kernels): case i is the same problem for the same kernel in every run. The file is
the state too: a run that was stopped, or asked for more cases, goes on where it ended.
"""

import argparse
import random
import sys
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from flashcheck import emulator
from flashcheck.checks import Judged
from flashcheck.checks.rms import RmsTally
from flashcheck.checks.score_tests import ScoreTally
from flashcheck.devices import choose_device, interpret_without_gpu
from flashcheck.inputs.combinations import is_legal
from flashcheck.inputs.problems import Wishes, draw_spec, families_for
from flashcheck.inputs.values import FAMILIES
from flashcheck.kernel import Kernel
from flashcheck.loading import load
from tests.long_run import LongRun, tally_from

SEED = 4711
_ATTEMPTS = 100
_FREE = 0.1
_LENGTHS = (1, 2, 7, 16, 17, 31, 33, 48, 65)
"""Lengths of nine problems in ten: around the edges of small tiles. One in ten is drawn as certify draws."""
_KEPT = 50  # problems outside their bound that are kept, per ledger line

PARTS = {**dict.fromkeys(emulator.KERNELS, 2), "torch.sdpa.flash": 5, "torch.sdpa.math": 5}
"""Share of each kernel in the cases. The bundled Triton kernels are slow in the interpreter, so few."""
TRITON = {"kernels:flash_attention": 1}


class Line:
    """One output tensor of one kernel and dtype."""

    def __init__(self) -> None:
        self.cases = self.elements = self.over = self.outside_algorithm = 0
        self.worst = self.worst_algorithm = 0.0
        self.worst_spec: dict | None = None
        self.kept: list[dict] = []
        self.rms, self.gating = RmsTally(), RmsTally()
        self.scores = {"scale": ScoreTally(), "cast": ScoreTally()}

    def add(self, case: int, spec, measured, got, centred, live) -> None:
        self.cases += 1
        self.elements += measured.elements
        self.over += measured.over
        margin = measured.worst.margin if measured.worst else 0.0
        if margin > self.worst:
            self.worst, self.worst_spec = margin, spec.to_json()
        entry = {"case": case, "margin": margin, "spec": spec.to_json()}
        if centred is not None and bool(live.any()):
            margins = torch.where(live, centred.margin(got), 0.0)
            self.outside_algorithm += int((margins > 1).sum())
            self.worst_algorithm = max(self.worst_algorithm, float(margins.max()))
            entry["algorithm"] = float(margins.max())
        if max(margin, entry.get("algorithm", 0.0)) > 1 and len(self.kept) < _KEPT:
            self.kept.append(entry)
        if "ordinary" in FAMILIES[spec.family].properties:
            self.rms.add(measured)
            if measured.gates:
                self.gating.add(measured)

    def to_json(self) -> dict:
        out = {k: v for k, v in vars(self).items() if k not in ("rms", "gating", "scores")}
        out |= {"rms": asdict(self.rms), "gating": asdict(self.gating)}
        return out | {"scores": {name: asdict(tally) for name, tally in self.scores.items()}}

    @staticmethod
    def from_json(data: dict) -> "Line":
        line = Line()
        for name, value in data.items():
            if name not in ("rms", "gating", "scores"):
                setattr(
                    line, name, float(value) if name.startswith("worst") and name != "worst_spec" else value
                )
        line.rms, line.gating = tally_from(RmsTally, data["rms"]), tally_from(RmsTally, data["gating"])
        line.scores = {name: tally_from(ScoreTally, x) for name, x in data["scores"].items()}
        return line


class Run(LongRun):
    """The state of a run."""

    def __init__(self, parts: dict[str, int], seed: int, path: Path | None) -> None:
        self.lines: dict[str, Line] = {}
        self.families: Counter[str] = Counter()
        self.faults: list[str] = []
        self.kernels: dict[str, tuple[Kernel, str]] = {}
        super().__init__(parts, seed, path)

    def restore(self, data: dict[str, Any]) -> None:
        """The ledger of an earlier part of the run."""
        self.faults, self.families = data["faults"], Counter(data["families"])
        self.lines = {key: Line.from_json(line) for key, line in data["lines"].items()}

    def state(self) -> dict[str, Any]:
        """The ledger."""
        return {
            "families": dict(self.families),
            "faults": self.faults,
            "lines": {key: line.to_json() for key, line in sorted(self.lines.items())},
        }

    def fault(self, number: int, words: str) -> None:
        """Of the judge or of a kernel."""
        self.faults.append(f"case {number} {words}"[:1000])

    def worst(self) -> str:
        """The largest margin so far."""
        margin = max((line.worst for line in self.lines.values()), default=0.0)
        return f"worst margin {margin:.3f}, {len(self.faults)} faults"

    def kernel(self, name: str) -> tuple[Kernel, str]:
        """The kernel and its device."""
        if name not in self.kernels:
            kernel = load(name)
            kernel.self_test()
            self.kernels[name] = kernel, choose_device(None, kernel)
        return self.kernels[name]

    def case(self, number: int) -> None:
        """Judges case ``number``: its kernel, and a problem drawn for it."""
        name = self.order[number % len(self.order)]
        kernel, device = self.kernel(name)
        capabilities = kernel.capabilities
        rng = random.Random(f"{self.seed}/{number}")
        families = families_for(capabilities)
        family = families[(number // len(self.order)) % len(families)]
        dtype = rng.choice(capabilities.dtypes)
        for _ in range(_ATTEMPTS):
            lengths = None if rng.random() < _FREE else (rng.choice(_LENGTHS), rng.choice(_LENGTHS))
            wishes = Wishes(family=family, lengths=lengths)
            spec = draw_spec(rng, capabilities, dtype, rng.randrange(2**31), wishes)
            if is_legal(spec, capabilities):
                break
        else:
            return
        self.families[family] += 1
        try:
            self._judge(number, name, Judged(kernel, spec.build(), device), spec)
        except Exception as error:
            self.fault(number, f"{name} {spec.to_json()}: {type(error).__name__}: {error}")

    def _judge(self, number: int, name: str, judged: Judged, spec) -> None:
        kernel = judged.kernel
        live = (~judged.empty_rows).unsqueeze(-1)
        bounds = {"O": judged.bound.out, "LSE": judged.bound.lse}
        measured = dict(judged.measured)
        if kernel.backward is not None and judged.backward_defined:
            measured |= judged.measured_gradients
            bounds |= {n: judged.backward_bound.tensors[n.lower()] for n in judged.measured_gradients}
        for tensor, numbers in measured.items():
            line = self.lines.setdefault(f"{name} {spec.dtype} {tensor}", Line())
            seen = live if tensor == "O" else torch.ones((), dtype=torch.bool)
            line.add(number, spec, numbers, numbers.got, bounds[tensor].centred, seen)
            gates = numbers.gates and "ordinary" in FAMILIES[spec.family].properties
            if tensor == "O" and gates:
                for direction, sums in judged.score_sums.items():
                    line.scores[direction].add(sums)

    def table(self) -> str:
        """One line per kernel, dtype and tensor."""
        out = [
            f"{self.done:,} cases in {self.seconds:.0f} s; {len(self.faults)} faults of the judge or kernels"
        ]
        width = max([28, *(len(key.split(" ", 1)[0]) + 1 for key in self.lines)])
        out.append(
            f"{'kernel':<{width}}{'dtype':<6}{'tensor':<7}{'cases':>6}{'elements':>12}{'worst A':>10}"
            f"{'over':>6}{'worst C':>10}{'outside':>8}{'R':>8}{'gating R':>9}{'scale':>20}{'cast':>16}"
        )
        for key, x in sorted(self.lines.items()):
            name, dtype, tensor = key.rsplit(" ", 2)
            ratios = [
                f"{t.ratio:.3f}" if t.ratio is not None and t.judges else "-" for t in (x.rms, x.gating)
            ]
            amounts = [
                f"{t.amount:+.1e} ({t.amount / t.standard_error:+.1f} s)" if t.elements else "-"
                for t in x.scores.values()
            ]
            out.append(
                f"{name:<{width}}{dtype:<6}{tensor:<7}{x.cases:>6}{x.elements:>12,}{x.worst:>10.3f}{x.over:>6}"
                f"{x.worst_algorithm:>10.3f}{x.outside_algorithm:>8}{ratios[0]:>8}{ratios[1]:>9}"
                f"{amounts[0]:>20}{amounts[1]:>16}"
            )
        return "\n".join(out)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--kernels", nargs="*", help="default: emulator presets, torch SDPA, Triton kernels")
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args(arguments)
    interpret_without_gpu()
    torch.set_num_threads(1)
    parts = dict.fromkeys(given.kernels, 1) if given.kernels else {**PARTS, **TRITON}
    run = Run(parts, given.seed, given.json)
    run.go(given.cases)
    print(run.table())
    over = sum(line.over + line.outside_algorithm for line in run.lines.values())
    return 1 if over or run.faults else 0


if __name__ == "__main__":
    sys.exit(main())
