"""Probes a device, prints and writes what was found."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from flashcheck.commands.exit_codes import EXIT_CODES, INTERRUPTED
from flashcheck.devices import interpret_without_gpu
from flashcheck.errors import ArgumentError
from flashcheck.loading import load
from flashcheck.probe.device import present_device
from flashcheck.probe.findings import ProbeReport
from flashcheck.report.probe_table import print_contradictions, print_probe


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeRequest:
    """The options of ``probe`` as the user gave them."""

    device: str | None = None
    json: Path | None = None
    quick: bool = False
    kernel: str | None = None


def run_probe(request: ProbeRequest, stdout: Console, stderr: Console) -> int:
    """Measures, prints, writes; 4 where the machine model that verdicts use here is contradicted."""
    interpret_without_gpu()
    kernel = None if request.kernel is None else load(request.kernel)
    if kernel is not None:
        kernel.self_test()  # kernels that mend the interpreter do it here
    device = present_device(request.device)
    # Only now: importing it decides whether Triton's kernels are interpreted.
    from flashcheck.arithmetic import IEEE, INTERPRETER
    from flashcheck.formats import FORMATS
    from flashcheck.kernel import machine_for
    from flashcheck.probe.machine import contradictions, platform_of
    from flashcheck.probe.run import probe, write_report

    with Progress(
        TextColumn("probe"), BarColumn(), TextColumn("{task.description}"), console=stderr, transient=True
    ) as progress:
        task = progress.add_task("", total=None)

        def show(name: str, done: int, total: int) -> None:
            progress.update(task, description=name, completed=done, total=total)

        report = probe(device, "quick" if request.quick else "full", on_step=show)
    print_probe(stdout, report)
    if request.json is not None:
        write_report(report, request.json)
        stdout.print(f"\nreport       {request.json}", soft_wrap=True)
    if report.interrupted:
        return INTERRUPTED
    if kernel is not None:
        machines = [kernel.machine(device)]
        formats: tuple[str, ...] = kernel.capabilities.dtypes
    elif device.type == "cpu":
        machines, formats = [INTERPRETER, IEEE], tuple(FORMATS)
    else:
        try:
            machines, formats = [machine_for(device)], tuple(FORMATS)
        except ArgumentError as error:
            stdout.print(f"no machine model for this device: {error}", soft_wrap=True)
            return 0
    found = False
    for machine in machines:
        lines = contradictions(machine, report, platform_of(machine, device.type), formats)
        print_contradictions(stdout, machine.name, lines)
        found |= bool(lines)
        if lines and _may_be_repaired(report, kernel is None):
            stdout.print(
                "  this is the interpreter as it comes; --kernel NAME measures it as that kernel leaves it",
                soft_wrap=True,
            )
    return EXIT_CODES["judge failed"] if found else 0


def _may_be_repaired(report: ProbeReport, as_it_comes: bool) -> bool:
    return as_it_comes and report.device.triton == "interpreted"
