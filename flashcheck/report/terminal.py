"""What a person reads: a table per dtype and output tensor, the findings, the verdict."""

from __future__ import annotations

import math
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from flashcheck.report.certificate import Certificate, FindingPart, TensorPart

_STYLE = {"certified": "bold green", "rejected": "bold red", "incomplete": "bold yellow"}
MEANING = {
    "certified": "everything declared was judged; every element lies inside its proved bound",
    "rejected": "at least one check failed",
    "incomplete": "nothing failed, but something that the kernel declares was not judged",
    "judge failed": "no verdict on the kernel: the checker or its platform is at fault",
}
_LINES_PER_FINDING = 12

SPEC_DEFAULTS: dict[str, Any] = {"num_queries": 16, "num_keys": 16, "head_dim": 16, "family": "normal"}
"""Of ``ProblemSpec``, which leaves defaults out; repeated here so that reports need no torch."""


def print_certificate(console: Console, certificate: Certificate, verbose: bool = False) -> None:
    """The whole report but its last lines."""
    run = certificate.run
    console.print(
        f"[bold]{escape(certificate.kernel.name)}[/] on {escape(certificate.machine.device)} "
        f"(model {certificate.machine.model['name']}), level {run.level}, seed {run.seed}: "
        f"{run.judged:,} of {run.planned:,} problems in {run.seconds:.1f} s",
        soft_wrap=True,
    )
    if certificate.tensors:
        console.print(tensor_table(certificate))
    if verbose and certificate.slack:
        console.print(slack_table(certificate))
    for finding in certificate.findings:
        for line in finding_lines(certificate.kernel.name, finding):
            console.print(line, soft_wrap=True)
    for dtype, tiling in certificate.tilings.items():
        console.print(Text(f"tiling, {dtype}: {tiling}"), soft_wrap=True)
    for fault in certificate.judge_faults:
        console.print(Text(f"judge: {fault}", style="bold magenta"), soft_wrap=True)
    for words, counts in (("pairs", certificate.coverage.pairs), ("triples", certificate.coverage.triples)):
        judged = ", ".join(f"{dtype} {some:,} of {all_:,}" for dtype, (some, all_) in counts.items())
        if judged and (words == "pairs" or verbose):
            console.print(Text(f"{words} of option values judged: {judged}"), soft_wrap=True)
    for dtype, labels in certificate.coverage.missing.items():
        console.print(Text(f"not judged, {dtype}: {', '.join(labels)}", style="yellow"), soft_wrap=True)
    if run.stopped:
        console.print(Text(f"stopped: {run.stopped}", style="yellow"), soft_wrap=True)


def print_ending(console: Console, certificate: Certificate, path: str) -> None:
    """Verdict, file, next command: the last lines of every run."""
    verdict = certificate.verdict
    line = Text(verdict.upper(), style=_STYLE.get(verdict, "bold magenta"))
    line.append(f"  {certificate.kernel.name}: {MEANING[verdict]}", style="default")
    console.print(line, soft_wrap=True)
    console.print(Text(f"certificate  {path}"), soft_wrap=True)
    console.print(Text(f"again        {certificate.run.command}"), soft_wrap=True)


def tensor_table(certificate: Certificate) -> Table:
    """cases, worst margin and where, rms ratio, special cases, verdict."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    for heading, side in (
        ("dtype", "left"),
        ("tensor", "left"),
        ("cases", "right"),
        ("elements", "right"),
        ("worst margin", "right"),
        ("at", "left"),
        ("rms ratio", "right"),
        ("special", "right"),
        ("verdict", "left"),
    ):
        table.add_column(heading, justify="right" if side == "right" else "left", no_wrap=heading != "at")
    for t in certificate.tensors:
        style = "green" if t.verdict == "pass" else "bold red"
        table.add_row(
            t.dtype,
            t.tensor,
            f"{t.cases:,}",
            f"{t.elements:,}",
            number(t.worst_margin),
            place(t, certificate.problems),
            ratio(t),
            f"{t.special_passed}/{t.special_total}",
            Text(t.verdict, style=style),
        )
    return table


def slack_table(certificate: Certificate) -> Table:
    """Median of bound / |error| per family and dtype, for each tensor."""
    table = Table(
        box=None, header_style="bold", pad_edge=False, title="median bound / |error|", title_justify="left"
    )
    columns = [(t.dtype, t.tensor) for t in certificate.tensors]
    table.add_column("values")
    for dtype, tensor in columns:
        table.add_column(f"{dtype} {tensor}", justify="right")
    known = {(s.family, s.dtype, s.tensor): s.median_slack for s in certificate.slack}
    for family in sorted({s.family for s in certificate.slack}):
        cells = [known.get((family, dtype, tensor)) for dtype, tensor in columns]
        table.add_row(family, *("" if x is None else "exact" if math.isinf(x) else f"{x:.3g}" for x in cells))
    return table


def finding_lines(kernel: str, finding: FindingPart) -> list[Text]:
    """At most twelve lines: verdict and place first, then values, census, problem, likely cause."""
    head = Text("FAILED", style="bold red")
    head.append(f"  {kernel}  {finding.check}  {finding.dtype}", style="default")
    lines = [head, Text(f"  {finding.message}")]
    if finding.where is not None:
        w = finding.where
        place = f"{w.tensor}[{','.join(map(str, w.index))}]"
        error = abs(float.fromhex(w.got) - float.fromhex(w.exact))
        lines.append(
            Text(
                f"  {place}: got {w.got}, exact {w.exact}, |error| {error:.3g}, accepted up to {w.bound:.3g}"
            )
        )
    lines += [Text(f"  {line}") for line in finding.evidence]
    if finding.problem:
        more = f"   and {finding.cases - 1} more problems" if finding.cases > 1 else ""
        lines.append(Text(f"  problem  {finding.problem}{more}"))
    lines += [Text(f"  likely   {guess}", style="bold") for guess in finding.likely]
    return lines[:_LINES_PER_FINDING]


def number(x: float) -> str:
    """Three decimals, or three digits where it is large."""
    return "inf" if math.isinf(x) else f"{x:.3f}" if x < 1000 else f"{x:.3g}"


def ratio(t: TensorPart) -> str:
    """The rms ratio; with a star where it is information only."""
    if t.rms_ratio is None:
        return "-"
    return number(t.rms_ratio) + ("" if t.rms_judged else " *")


def place(t: TensorPart, problems: dict[str, dict[str, Any]]) -> str:
    """Index of the worst element and its problem in short."""
    if t.worst is None or t.worst_problem is None:
        return "-"
    index = ",".join(str(i) for i in t.worst.index)
    return f"[{index}] {short(problems[t.worst_problem])}"


def short(spec: dict[str, Any]) -> str:
    """Lengths, head dim, causality and value family of a problem spec, defaults filled in."""
    get = {**SPEC_DEFAULTS, **spec}.get
    causal = f" {get('causal')}" if get("causal") else ""
    return f"{get('num_queries')}x{get('num_keys')} d={get('head_dim')}{causal} {get('family')}"
