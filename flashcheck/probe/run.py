"""Runs the probes one after another; a probe that fails is a row of the report."""

from __future__ import annotations

import datetime
import hashlib
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Literal

import torch
from pydantic import ValidationError

from flashcheck.files import write_atomically
from flashcheck.flushing import NARROW
from flashcheck.probe.arguments import Arguments
from flashcheck.probe.casts import TARGETS, measure_cast
from flashcheck.probe.device import describe_device
from flashcheck.probe.findings import (
    AdditionFinding,
    CastFinding,
    DeviceFinding,
    FunctionFinding,
    Platform,
    ProbeReport,
    ProductFinding,
)
from flashcheck.probe.functions import FUNCTIONS, measure_addition, measure_function
from flashcheck.probe.machine import machine_from
from flashcheck.probe.products import measure_products, measure_subnormals
from flashcheck.probe.units import torch_units, triton_units

Step = Callable[[], ProductFinding | AdditionFinding | CastFinding | FunctionFinding]
Level = Literal["gate", "quick", "full"]

_SAMPLE = {"gate": 32, "quick": 256, "full": 2048}
"""Significands per sign and exponent where arguments are sampled: 2^14, 2^17 and 2^20 arguments."""

_GATING = ("exp2", "exp", "log", "log2", "division", "product with reciprocal")


def probe(
    device: torch.device,
    level: Level = "full",
    platforms: tuple[Platform, ...] = ("triton", "torch"),
    on_step: Callable[[str, int, int], None] = lambda _name, _done, _total: None,
) -> ProbeReport:
    """Measures the arithmetic of ``device``.

    Args:
        level: ``gate``: what a verdict needs, on few arguments; ``quick``: everything, on a sample;
            ``full``: all 2^32 arguments of each function and cast on a GPU, a larger sample on a CPU.
        platforms: through Triton, through torch, or both.
        on_step: told the name of each probe, how many are done, and how many there are.

    Ctrl-C ends it with what there is (``interrupted``).
    """
    started = time.perf_counter()
    steps = _steps(device, level, platforms)
    found: list[object] = []
    interrupted = False
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # numpy's, on overflow in the interpreter
            for number, (name, step) in enumerate(steps):
                on_step(name, number, len(steps))
                found.append(step())
    except KeyboardInterrupt:
        interrupted = True
    report = ProbeReport(
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        seconds=round(time.perf_counter() - started, 3),
        quick=level != "full",
        device=describe_device(device),
        products=[x for x in found if isinstance(x, ProductFinding)],
        additions=[x for x in found if isinstance(x, AdditionFinding)],
        casts=[x for x in found if isinstance(x, CastFinding)],
        functions=[x for x in found if isinstance(x, FunctionFinding)],
        interrupted=interrupted,
    )
    machines = {p: machine_from(report, p).describe() for p in platforms}
    return report.model_copy(update={"machines": machines})


def _steps(device: torch.device, level: Level, platforms: tuple[Platform, ...]) -> list[tuple[str, Step]]:
    exhaustive = level == "full" and device.type == "cuda"
    arguments = Arguments(None if exhaustive else _SAMPLE[level])
    description = describe_device(device)
    steps: list[tuple[str, Step]] = []
    for platform in platforms:
        if platform == "triton":
            if description.triton == "not installed":
                continue
            units = list(triton_units(description.triton == "compiled"))
        else:
            units = list(torch_units())
        steps += [(f"{u.name} {u.operands}", partial(measure_products, u, device)) for u in units]
        if platform == "torch" and device.type == "cpu":
            steps += [(f"torch.matmul {fmt} subnormals", partial(measure_subnormals, fmt)) for fmt in NARROW]
        steps.append((f"{platform} addition", partial(measure_addition, platform, device)))
        for fmt in TARGETS:
            steps.append(
                (f"{platform} cast to {fmt}", partial(measure_cast, fmt, platform, arguments, device))
            )
        for name, function in FUNCTIONS.items():
            if level != "gate" or name in _GATING:
                steps.append(
                    (f"{platform} {name}", partial(measure_function, function, platform, arguments, device))
                )
    return steps


def cached_probe(device: torch.device, platform: Platform, folder: Path) -> ProbeReport:
    """The ``gate`` probe of one platform, from ``folder`` where this device, these versions and this state
    of the interpreter were measured before."""
    path = folder / f"{_digest(describe_device(device), platform)}.json"
    try:
        return ProbeReport.model_validate_json(path.read_text(encoding="utf-8"))
    except (OSError, ValidationError):
        pass  # not there yet, or written by another version
    report = probe(device, "gate", (platform,))
    if not report.interrupted:
        write_report(report, path)
    return report


def _digest(device: DeviceFinding, platform: str) -> str:
    return hashlib.sha256(f"{platform} {device.model_dump_json()}".encode()).hexdigest()[:24]


def write_report(report: ProbeReport, path: Path) -> None:
    """Writes atomically: a reader sees the old file or the whole new one."""
    write_atomically(path, report.model_dump_json(indent=1) + "\n")
