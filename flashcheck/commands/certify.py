"""Loads kernels, certifies them, prints and writes the certificates."""

from __future__ import annotations

import datetime
import re
import shlex
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from flashcheck.ahead import CompilingAhead, default_helpers
from flashcheck.certify import Outcome, Progress
from flashcheck.commands.durations import seconds
from flashcheck.commands.exit_codes import INTERRUPTED, SEVERITY, exit_code
from flashcheck.devices import choose_device, interpret_without_gpu
from flashcheck.errors import ArgumentError
from flashcheck.kernel import Kernel
from flashcheck.loading import load
from flashcheck.plan import DEFAULT_LEVEL, DEFAULT_SEED, make_plan
from flashcheck.probe.gate import gate
from flashcheck.report.build import certificate_of
from flashcheck.report.certificate import write
from flashcheck.report.progress import ProgressReport
from flashcheck.report.terminal import print_certificate, print_ending
from flashcheck.settings import read_settings
from flashcheck.workers import certify_by_name

FOLDER = Path(".flashcheck")


@dataclass(frozen=True, slots=True, kw_only=True)
class CertifyRequest:
    """The options of ``certify`` as the user gave them."""

    kernels: tuple[str, ...] = ()
    level: str | None = None
    dtypes: tuple[str, ...] = ()
    max_cases: int | None = None
    max_time: str | None = None
    seed: int | None = None
    out: Path | None = None
    device: str | None = None
    compile_ahead: int | None = None
    verbose: bool = False
    quiet: bool = False


def run_certify(request: CertifyRequest, stdout: Console, stderr: Console) -> int:
    """Certifies every kernel asked for; the exit code of the worst outcome."""
    settings = read_settings(Path.cwd())
    names = request.kernels or settings.kernels
    if not names:
        raise ArgumentError(
            "KERNEL", "none given", "a kernel name, or kernels in [tool.flashcheck] of ./pyproject.toml"
        )
    if request.out is not None and len(names) > 1:
        raise ArgumentError("--out", str(request.out), f"one kernel, not {len(names)}")
    level = request.level or settings.level
    max_seconds = None if request.max_time is None else seconds(request.max_time)
    interpret_without_gpu()
    worst = 0
    for name in names:
        code = _certify_one(load(name), name, level, max_seconds, request, stdout, stderr)
        worst = max(worst, code, key=SEVERITY.index)
        if code == INTERRUPTED:
            break
    return worst


def _certify_one(
    kernel: Kernel,
    name: str,
    level: str,
    max_seconds: float | None,
    request: CertifyRequest,
    stdout: Console,
    stderr: Console,
) -> int:
    device = choose_device(request.device, kernel)
    seed = DEFAULT_SEED if request.seed is None else request.seed
    plan = make_plan(kernel, level, request.dtypes, request.max_cases, seed, device)
    started = datetime.datetime.now(datetime.UTC)
    probed = gate(kernel, device, plan.dtypes, FOLDER / "probe")
    with ProgressReport(stderr, name, request.quiet) as progress:
        if probed.contradictions:  # no bound holds on a machine that breaks the declared one
            outcome = Outcome(plan, judge_faults=[f"probe: {line}" for line in probed.contradictions])
        else:
            count = default_helpers(device) if request.compile_ahead is None else request.compile_ahead
            with CompilingAhead(name, device, plan.cases, count) as ahead:

                def show(event: Progress) -> None:
                    ahead.judged(event.case)
                    progress.event(event, ahead.describe())

                outcome = certify_by_name(
                    name, kernel, plan, device=device, max_seconds=max_seconds, on_progress=show
                )
    command = _command(name, level, request)
    certificate = certificate_of(kernel, outcome, device, command, started, name, probed=probed.describe())
    path = request.out or FOLDER / "certificates" / f"{_file_name(name)}-{started:%Y%m%dT%H%M%SZ}.json"
    write(certificate, path)
    if request.out is None:
        _ignore_folder()
    if not request.quiet:
        print_certificate(stdout, certificate, request.verbose)
    print_ending(stdout, certificate, str(path))
    return exit_code(outcome)


def _command(name: str, level: str, request: CertifyRequest) -> str:
    parts = ["flashcheck", "certify", name]
    if level != DEFAULT_LEVEL:
        parts += ["--level", level]
    for dtype in request.dtypes:
        parts += ["--dtype", dtype]
    for option, value in (
        ("--max-cases", request.max_cases),
        ("--max-time", request.max_time),
        ("--seed", request.seed),
        ("--device", request.device),
    ):
        if value is not None:
            parts += [option, str(value)]
    return shlex.join(parts)


def _file_name(kernel: str) -> str:
    return re.sub(r"[^A-Za-z0-9_.]+", "-", kernel)


def _ignore_folder() -> None:
    """Keeps the folder out of the user's version control without touching their files."""
    ignore = FOLDER / ".gitignore"
    if not ignore.exists():
        ignore.write_text("*\n", encoding="utf-8")
