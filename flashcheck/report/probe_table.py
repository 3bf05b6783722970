"""What a probe found, as tables."""

from __future__ import annotations

import math

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from flashcheck.probe.findings import ProbeReport, ProductFinding


def print_probe(console: Console, report: ProbeReport) -> None:
    """Device, one table for each kind of finding, and what could not be measured."""
    device = report.device
    versions = ", ".join(f"{name} {version}" for name, version in device.versions.items())
    capability = f", compute capability {device.capability}" if device.capability else ""
    console.print(f"[bold]{escape(device.name)}[/]{capability}; Triton {device.triton}", soft_wrap=True)
    console.print(Text(f"{versions}; {report.seconds:.1f} s"), soft_wrap=True)
    for table in (_products(report), _additions(report), _casts(report), _functions(report)):
        if table.row_count:
            console.print()
            console.print(table)
    if lines := report.failures():
        console.print()
        console.print(Text("not measured", style="bold"))
        for line in lines:
            console.print(Text(f"  {line}", style="yellow"), soft_wrap=True)


def print_contradictions(console: Console, machine: str, lines: list[str]) -> None:
    """Whether the machine model that verdicts use here holds."""
    console.print()
    if not lines:
        console.print(
            Text(f"model {machine}: nothing measured contradicts it", style="green"), soft_wrap=True
        )
        return
    console.print(
        Text(f"model {machine}: contradicted; verdicts that assume it are refused", style="bold red"),
        soft_wrap=True,
    )
    for line in lines:
        console.print(Text(f"  {line}"), soft_wrap=True)


def _table(title: str, *headings: str) -> Table:
    table = Table(
        box=None, header_style="bold", pad_edge=False, title=title, title_justify="left", title_style="bold"
    )
    for heading in headings:
        table.add_column(heading)
    return table


def _products(report: ProbeReport) -> Table:
    table = _table(
        "matrix products: bits are fraction bits below the largest addend",
        "through",
        "operands",
        "bits",
        "sum stored",
        "while adding",
        "step",
        "subnormals",
        "random sums",
    )
    for p in report.products:
        if p.failed:
            continue
        if p.wrong:
            table.add_row(p.unit, p.operands, Text(f"wrong: {p.wrong}", style="bold red"))
            continue
        if p.sum_bits is None:
            table.add_row(p.unit, p.operands, "-", "-", "-", "-", _subnormals(p), "not compared")
            continue
        bits = f"{p.operand_bits}" + ("" if p.operand_rounding == "exact" else f" ({p.operand_rounding})")
        table.add_row(
            p.unit,
            p.operands,
            bits,
            f"{p.sum_bits} bits, {p.rounding}",
            _kept(p),
            "unknown" if p.block is None else "each addition" if p.block == 1 else f"{p.block} products",
            _subnormals(p),
            _agreement(p),
        )
    return table


def _subnormals(p: ProductFinding) -> str:
    if p.subnormal_operands == p.subnormal_sums:
        return p.subnormal_operands
    return f"operands {p.subnormal_operands}, sums {p.subnormal_sums}"


def _kept(p: ProductFinding) -> str:
    if p.block == 1 and p.rounding == "nearest":
        return "as stored"
    if p.kept_products == p.kept_accumulator:
        return f"{p.kept_bits} bits"
    return f"{p.kept_products} bits, {p.kept_accumulator} with the accumulator"


def _agreement(p: ProductFinding) -> str:
    if p.largest_error is None:
        return "not compared: no model"
    if p.bits_tested:
        return f"{p.bits_agree:,} of {p.bits_tested:,} bit for bit, error {p.largest_error:.2f} x bound"
    return f"error {p.largest_error:.2f} x bound"


def _additions(report: ProbeReport) -> Table:
    table = _table("fp32 arithmetic", "through", "a + b", "subnormal sums", "a * b + c", "fma(a, b, c)")
    words = {True: "rounded once", False: "rounded twice", None: "unknown"}
    for a in report.additions:
        if not a.failed:
            table.add_row(a.platform, a.addition, a.subnormal_sums, words[a.fused], words[a.explicit])
    return table


def _casts(report: ProbeReport) -> Table:
    table = _table(
        "casts from fp32", "through", "to", "rounding", "not nearest", "overflow", "infinity", "NaN", "tested"
    )
    for c in report.casts:
        if not c.failed:
            table.add_row(
                c.platform,
                c.target,
                Text(c.rounding, style="bold red" if c.wrong else ""),
                f"{c.wrong:,}",
                c.overflow,
                c.infinity,
                "kept" if c.nan_kept else "lost",
                _tested(c.tested, c.exhaustive),
            )
    return table


def _functions(report: ProbeReport) -> Table:
    table = _table(
        "functions of fp32 arguments: errors in units of 2^-24",
        "through",
        "function",
        "relative",
        "ulp",
        "mean",
        "|f| <= 1: absolute",
        "|f| > 1: relative",
        "zero below",
        "special",
        "tested",
    )
    for f in report.functions:
        if not f.failed:
            small = abs(f.relative) < 1e4
            table.add_row(
                f.platform,
                f.function,
                f"{f.relative:.3f}" if small else "-",
                f"{f.ulps:.3f}" if small else "-",
                f"{f.bias:+.3f}" if small else "-",
                f"{f.absolute:.3f}",
                f"{f.relative_above_one:.3f}",
                "-" if not f.flush else f"2^{math.log2(f.flush):.4g}",
                ", ".join(f"f({x}) = {y}" for x, y in f.special.items()) or "right",
                _tested(f.tested, f.exhaustive),
            )
    return table


def _tested(count: int, exhaustive: bool) -> str:
    return "all" if exhaustive else f"{count:,}"
