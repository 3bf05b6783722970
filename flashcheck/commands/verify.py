"""Confirms a certificate by running its worst cases again."""

from __future__ import annotations

import math
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from flashcheck.devices import choose_device, interpret_without_gpu
from flashcheck.errors import ArgumentError, UnknownNameError
from flashcheck.kernel import Kernel
from flashcheck.loading import load
from flashcheck.report.certificate import Certificate, read
from flashcheck.report.terminal import finding_lines, number, short
from flashcheck.report.verify import Again, changes, judge_problem, run_again


def run_verify(
    path: Path, kernel_name: str | None, device: str | None, problem: str | None, stdout: Console
) -> int:
    """0 every number confirmed, 1 not, 3 another machine, version or source, and all inside their bounds."""
    certificate = read(path)
    name = kernel_name or certificate.kernel.load_name
    if not name:
        raise ArgumentError("--kernel", "none", "a name: the certificate's kernel was given as an object")
    if problem is not None and problem not in certificate.problems:
        raise UnknownNameError("--problem", problem, certificate.problems)
    interpret_without_gpu()
    kernel = load(name)
    where = _device(certificate, kernel, device)
    if problem is not None:
        return _one_problem(certificate, problem, kernel, where, stdout)
    rows = run_again(certificate, kernel, where)
    changed = changes(certificate, kernel, where)
    stdout.print(_table(certificate, rows))
    for line in changed:
        stdout.print(Text(f"changed  {line}", style="yellow"), soft_wrap=True)
    return _ending(certificate, rows, changed, stdout)


def _device(certificate: Certificate, kernel: Kernel, asked: str | None) -> str:
    """The one asked for, else one of the kind that the certificate was made on, else any."""
    if asked is None and certificate.machine.device != "cpu":
        try:
            return choose_device("cuda", kernel)
        except ArgumentError:
            return choose_device(None, kernel)
    return choose_device(asked or "cpu", kernel)


def _table(certificate: Certificate, rows: list[Again]) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    for heading in ("dtype", "what", "recorded margin", "now", "bits", "problem"):
        table.add_column(heading, justify="right" if heading in ("recorded margin", "now") else "left")
    for row in rows:
        same = Text("same", style="green") if not row.differs else Text("; ".join(row.differs), style="red")
        table.add_row(
            row.dtype,
            row.tensor,
            "-" if math.isnan(row.recorded) else number(row.recorded),
            "-" if math.isnan(row.now) else number(row.now),
            same,
            f"{row.problem} {short(certificate.problems[row.problem])}",
        )
    return table


def _ending(certificate: Certificate, rows: list[Again], changed: list[str], stdout: Console) -> int:
    same = sum(not row.differs for row in rows)
    newly_over = sum(row.over and row.differs != () and not row.recorded > 1 for row in rows)
    name = certificate.kernel.name
    if rows and same == len(rows):
        word, style, text, code = "CONFIRMED", "green", f"all {same} recorded numbers, bit for bit", 0
    elif not rows:
        word, style, text, code = "NOTHING TO VERIFY", "yellow", "the certificate records no worst case", 3
    elif changed and not newly_over:
        text = (
            f"{same} of {len(rows)} numbers are the same; it is not the recorded kernel, machine or version"
        )
        word, style, code = "DIFFERS", "yellow", 3
    else:
        text = f"{same} of {len(rows)} recorded numbers come out again"
        text += f", {newly_over} now outside the bound" if newly_over else ""
        word, style, code = "NOT CONFIRMED", "red", 1
    line = Text(word, style=f"bold {style}")
    line.append(f"  {name}: {text}", style="default")
    stdout.print(line, soft_wrap=True)
    return code


def _one_problem(certificate: Certificate, problem: str, kernel: Kernel, device: str, stdout: Console) -> int:
    spec = certificate.problems[problem]
    stdout.print(f"problem {problem}: {spec.get('dtype', 'fp32')} {short(spec)}", highlight=False)
    passed, findings = judge_problem(certificate, problem, kernel, device)
    for name in passed:
        stdout.print(Text(f"passed  {name}", style="green"))
    for finding in findings:
        for line in finding_lines(certificate.kernel.name, finding):
            stdout.print(line, soft_wrap=True)
    return 1 if findings else 0
