"""An adversary: Hypothesis climbs toward the largest margin that an honest emulator can reach.

    python -m tests.bounds.adversary --cases 200 [--presets emulator.flash.bf16 ...] [--json FILE]

A margin above 1 would disprove a bound; one near 1 shows that the bound cannot be tightened without
assuming more. Reports the best per tensor, with the problem that reached it.
"""

import argparse
import json
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import hypothesis
import torch
from hypothesis import HealthCheck, Phase, given, settings, target

from flashcheck.checks import Judged
from flashcheck.inputs.spec import ProblemSpec
from flashcheck.inputs.strategies import specs
from flashcheck.kernel import Kernel
from flashcheck.loading import load
from flashcheck.report.build import versions

PRESETS = (
    "emulator.flash.bf16",
    "emulator.flash.fp16",
    "emulator.flash.fp32",
    "emulator.flash.e4m3",
    "emulator.hopper.flash.bf16",
    "emulator.hopper.flash.e4m3",
    "emulator.eager.bf16",
)
LARGEST_LENGTH = 40


@dataclass(slots=True)
class Best:
    """The largest margin of each tensor and the problem that reached it; how many problems were tried."""

    margins: dict[str, float] = field(default_factory=dict)
    specs: dict[str, ProblemSpec] = field(default_factory=dict)
    tried: int = 0


def margins_of(kernel: Kernel, spec: ProblemSpec) -> dict[str, float]:
    """Worst margin of each tensor, forward and backward."""
    judged = Judged(kernel, spec.build())
    measured = dict(judged.measured)
    if kernel.backward is not None and judged.backward_defined:
        measured |= judged.measured_gradients
    return {name: m.worst.margin for name, m in measured.items() if m.worst is not None}


def search(kernel: Kernel, cases: int, seed: int = 0, largest: int = LARGEST_LENGTH) -> Best:
    """Climbs over ``cases`` problems; the same for the same arguments and versions."""
    best = Best()
    (dtype,) = kernel.capabilities.dtypes

    @hypothesis.seed(seed)
    @settings(
        max_examples=cases,
        phases=(Phase.generate, Phase.target),
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(specs(kernel.capabilities, dtype, largest))
    def climb(spec: ProblemSpec) -> None:
        best.tried += 1
        for tensor, margin in margins_of(kernel, spec).items():
            target(min(margin, 2.0), label=tensor)
            if margin > best.margins.get(tensor, -1.0):
                best.margins[tensor], best.specs[tensor] = margin, spec

    climb()
    return best


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--cases", type=int, default=200, help="problems per preset")
    parser.add_argument("--presets", nargs="*", default=list(PRESETS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    given_ = parser.parse_args(arguments)
    torch.set_num_threads(1)
    found = {}
    for name in given_.presets:
        started = time.perf_counter()
        best = search(load(name), given_.cases, given_.seed)
        row = "  ".join(f"{tensor} {margin:.3f}" for tensor, margin in sorted(best.margins.items()))
        print(f"{name:<28}{best.tried:>5} problems  {row}  {time.perf_counter() - started:.0f} s", flush=True)
        found[name] = {
            tensor: {"margin": margin, "spec": best.specs[tensor].to_json()}
            for tensor, margin in best.margins.items()
        }
        if given_.json is not None:
            data = {"cases": given_.cases, "seed": given_.seed, "versions": versions(), "best": found}
            given_.json.write_text(json.dumps(data, indent=1))
    return 1 if any(x["margin"] > 1 for best in found.values() for x in best.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
