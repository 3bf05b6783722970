"""What ``certify`` asks of the probe: does the declared machine hold on the device where the kernel runs?"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from flashcheck.kernel import Kernel
from flashcheck.probe.findings import ProbeReport
from flashcheck.probe.machine import contradictions, platform_of
from flashcheck.probe.run import cached_probe


@dataclass(frozen=True, slots=True)
class Gate:
    """The probed machine, and where the declared one claims less error than was measured."""

    machine: dict[str, Any]
    report: ProbeReport
    contradictions: tuple[str, ...]

    def describe(self) -> dict[str, Any]:
        """What the certificate carries, as plain JSON data."""
        tested = max((f.tested for f in self.report.functions), default=0)
        return {
            "machine": self.machine,
            "measured": self.report.date,
            "arguments": "all" if all(f.exhaustive for f in self.report.functions) else f"sample of {tested}",
            "not_measured": self.report.failures(),
            "contradictions": list(self.contradictions),
        }


def gate(kernel: Kernel, device: str, formats: Iterable[str], folder: Path) -> Gate:
    """Probes the device for a kernel; findings are kept in ``folder`` for the next run.

    Args:
        formats: dtypes that will be judged; what the probe finds about other formats does not matter.
    """
    kernel.self_test()  # kernels that mend the interpreter do it here: it is measured as they leave it
    where = torch.device(device)
    declared = kernel.machine(where)
    platform = platform_of(declared, where.type)
    report = cached_probe(where, platform, folder)
    lines = contradictions(declared, report, platform, formats)
    return Gate(dict(report.machines.get(platform, {})), report, tuple(lines))
