"""What a campaign shows: a live panel on a terminal, a line now and then elsewhere, a summary at the end."""

from __future__ import annotations

import functools
import json
from types import TracebackType

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from flashcheck.checks import Record
from flashcheck.fuzz.campaign import State
from flashcheck.fuzz.case import FuzzCase
from flashcheck.fuzz.regions import Region
from flashcheck.fuzz.statistics import TensorStatistics, failed_statistics
from flashcheck.fuzz.store import Finding
from flashcheck.fuzz.totals import PARTS
from flashcheck.report.counting import LineTimer

MOST_REGIONS = 12
STAR = "*"


class FuzzView:
    """Context manager; call it with the state as often as you like."""

    def __init__(self, console: Console, quiet: bool) -> None:
        self.console = console
        self.quiet = quiet
        self.live: Live | None = None
        self.timer = LineTimer()

    def __enter__(self) -> FuzzView:
        if self.console.is_terminal and not self.quiet:
            self.live = Live(console=self.console, transient=True, refresh_per_second=4)
            self.live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.live is not None:
            self.live.stop()

    def __call__(self, state: State) -> None:
        if self.live is not None:
            self.live.update(Group(_now(state), coverage_table(state), finding_lines(state.findings)))
        elif not self.quiet and self.timer.due():
            self.console.print(_now(state), soft_wrap=True)


def _now(state: State) -> Text:
    line = headline(state)
    if not state.cases and not state.stopped:
        line.append("; starting: the first case is not judged yet")
    return line.append("; the hunt is over, what it found is reduced") if state.stopped else line


def headline(state: State) -> Text:
    """``kernel: cases, cases/s, where the time goes, findings``."""
    rate = state.cases / max(state.seconds, 1e-9)
    spent = sum(state.totals.seconds.values())
    parts = ", ".join(
        f"{part} {100 * state.totals.seconds[part] / spent:.0f}%"
        for part in PARTS
        if state.totals.seconds[part]
    )
    found = len(state.findings)
    text = (
        f"{state.kernel}: {state.totals.total:,} cases, {rate:.3g}/s, {state.seconds:.0f} s"
        + (f" ({parts})" if parts else "")
        + f", {found} finding{'' if found == 1 else 's'}"
    )
    return Text(text)


def coverage_table(state: State) -> Table:
    """A row per dtype and tensor: cases, coverage, worst margin, rms ratio and bias, where the margin was."""
    table = Table(box=None, pad_edge=False)
    for name, right in (("dtype", False), ("cases", True), ("covered", True), ("tensor", False)):
        table.add_column(name, justify="right" if right else "left")
    for name in ("worst margin", "rms ratio", "bias"):
        table.add_column(name, justify="right")
    table.add_column("at", overflow="ellipsis", no_wrap=True)
    for dtype in sorted(state.totals.cases):
        seen, owed = state.totals.covered.get(dtype, set()), state.owed.get(dtype, set())
        share = f"{len(seen & owed)}/{len(owed)}" if owed else f"{len(seen)}"
        first = [dtype, f"{state.totals.cases[dtype]:,}", share]
        with_sums = {t for (d, t), sums in state.totals.statistics.items() if d == dtype and sums.rms.rows}
        tensors = sorted({t for d, t in state.totals.worst if d == dtype} | with_sums)
        for tensor in tensors or ["-"]:
            margin, case = state.totals.worst.get((dtype, tensor), (None, None))
            at = "" if case is None else _described(json.dumps(case))
            sums = state.totals.statistics.get((dtype, tensor), TensorStatistics())
            shown = "-" if margin is None else f"{margin:.3f}"
            table.add_row(*first, tensor, shown, *_means(sums), at)
            first = ["", "", ""]
    return table


@functools.lru_cache(maxsize=256)
def _described(case: str) -> str:
    """The line of a case's problem; the panel asks for it several times a second."""
    return FuzzCase.from_json(json.loads(case)).build().describe()


def _means(sums: TensorStatistics) -> tuple[str, str]:
    """rms ratio and bias over the sampled cases; with a star where they are too few for a verdict."""
    star = "" if sums.judged else f" {STAR}"
    if sums.rms.ratio is None:
        return "-", "-"
    return f"{sums.rms.ratio:.3f}{star}", f"{sums.bias.mean:+.3f}{star}"


def finding_lines(findings: list[Finding]) -> Text:
    return Text("\n".join(f"  {f.id}  {f.group.check}  {f.failure.message}" for f in findings))


def print_summary(console: Console, state: State, folder: str) -> None:
    """Table, each finding with its replay line, why it stopped, the verdict: in this order."""
    console.print(coverage_table(state))
    if any(sums.rms.rows and not sums.judged for sums in state.totals.statistics.values()):
        console.print(Text(f"{STAR} over so few cases that no verdict is made of it"))
    for finding in state.findings:
        console.print()
        print_finding(console, finding, f"{folder}/findings/{finding.id}.json")
    rejected = failed_statistics(state.totals.statistics)
    for dtype, tensor, record in rejected:
        console.print()
        found = any(f.failure.tensor == tensor for f in state.findings)
        print_statistic(console, state.kernel, dtype, tensor, record, found)
    for fault, count in state.totals.faults.items():
        console.print(Text(f"JUDGE FAILED  ({count} cases)  {fault}"))
    if state.findings or rejected or state.totals.faults:
        console.print()
    if state.restarts:
        console.print(f"{state.restarts} workers were ended from outside and replaced", highlight=False)
    if state.ahead[0]:
        count, spent = state.ahead
        console.print(f"compiled ahead, in parallel: {count} problems in {spent:.0f} s", highlight=False)
    console.print(Text(f"stopped because {state.stopped}; seed {state.seed}, campaign {folder}"))
    if state.interrupted:
        console.print(Text(f"go on with      flashcheck fuzz {state.kernel} --db {folder} --resume"))
    console.print(headline(state))


def print_statistic(
    console: Console, kernel: str, dtype: str, tensor: str, record: Record, found: bool
) -> None:
    """A verdict over many cases: no one of them is the failure, so there is nothing to shrink or replay.

    ``found``: a finding on the same tensor stands above, of which this may be a consequence.
    """
    word = "ALSO" if found else "FOUND"
    lines = [f"{word}  {kernel}  {record.check}  {dtype}  {tensor}", f"  {record.message}"]
    lines += ["  a finding above may be the cause"] if found else []
    lines += [f"  {line}" for line in record.evidence]
    lines.append(f"  again    flashcheck certify {kernel} --dtype {dtype}  (other problems, the same check)")
    console.print(Text("\n".join(lines)))


def print_regions(console: Console, ranked: list[Region], new: str, old: str) -> None:
    """Where the new kernel's errors are larger than the old one's, the clearest regions first."""
    grown = [r for r in ranked if r.growth > 2 * r.deviation][:MOST_REGIONS]
    whole = [r for r in ranked if r.feature == "all"]
    console.print(Text(f"\n{new} against {old}: rms error, and cases whose worst margin is larger"))
    table = Table(box=None, pad_edge=False)
    for name in ("dtype", "tensor", "region", "cases", "error x", "worse in", "worst margin", "its", "at"):
        table.add_column(name, overflow="ellipsis" if name == "at" else "fold", no_wrap=name == "at")
    for r in [*whole, *(r for r in grown if r.feature != "all")]:
        new_margin, old_margin, case = r.largest
        at = "" if case is None else _described(json.dumps(case))
        low, high = (2 ** (r.growth + 2 * side * r.deviation) for side in (-1, 1))
        error = f"{2**r.growth:.3g} ({low:.3g}..{high:.3g})"
        margins = (f"{new_margin:.3f}", f"{old_margin:.3f}")
        table.add_row(
            r.dtype, r.tensor, r.feature, f"{r.cases:,}", error, f"{r.worse / r.cases:.0%}", *margins, at
        )
    console.print(table)
    if not grown:
        console.print(Text("in no region is the error larger by more than chance (2 standard errors)"))


def print_finding(console: Console, finding: Finding, path: str) -> None:
    """One finding in the order in which it is read: verdict, place, evidence, cause, how to go on.

    ``path``: its file.
    """
    failure, problem = finding.failure, finding.case.build()
    lines = [
        f"FOUND  {finding.kernel}  {finding.group.check}  {problem.format.name}  {failure.tensor}".rstrip()
    ]
    lines += [f"  {failure.message}", *([f"  at       {failure.where}"] if failure.where else [])]
    lines += [f"  {line}" for line in failure.evidence]
    lines.append(f"  problem  {problem.describe()}")
    lines.append(f"  from     {finding.first.build().describe()}")
    lines += [f"  likely   {guess}" for guess in failure.guesses]
    again, tries = finding.reproduces
    if tries and again < tries:
        lines.append(f"  repeats  the same bits in {again} of {tries} runs: the kernel is not deterministic")
    lines.append(f"  replay   flashcheck replay {path}")
    lines.append(f"  script   {finding.script or 'none: the campaign ended before it was written and run'}")
    console.print(Text("\n".join(lines)))
