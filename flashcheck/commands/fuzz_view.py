"""What a campaign shows: a live panel on a terminal, a line now and then elsewhere, a summary at the end."""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from flashcheck.fuzz.campaign import State
from flashcheck.fuzz.case import FuzzCase
from flashcheck.fuzz.store import Finding
from flashcheck.fuzz.totals import PARTS

SECONDS_BETWEEN_LINES = 30.0
MOST_LINES_OF_A_FINDING = 12


class FuzzView:
    """Context manager; call it with the state as often as you like."""

    def __init__(self, console: Console, quiet: bool) -> None:
        self.console = console
        self.quiet = quiet
        self.live: Live | None = None
        self.last = time.monotonic()

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
            self.live.update(Group(headline(state), coverage_table(state), finding_lines(state.findings)))
        elif not self.quiet and time.monotonic() - self.last >= SECONDS_BETWEEN_LINES:
            self.last = time.monotonic()
            self.console.print(headline(state))


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
    """A row per dtype and tensor: cases, coverage, worst margin and where."""
    table = Table(box=None, pad_edge=False)
    for name, right in (("dtype", False), ("cases", True), ("covered", True), ("tensor", False)):
        table.add_column(name, justify="right" if right else "left")
    table.add_column("worst margin", justify="right")
    table.add_column("at", overflow="ellipsis", no_wrap=True)
    for dtype in sorted(state.totals.cases):
        seen, owed = state.totals.covered.get(dtype, set()), state.owed.get(dtype, set())
        share = f"{len(seen & owed)}/{len(owed)}" if owed else f"{len(seen)}"
        first = [dtype, f"{state.totals.cases[dtype]:,}", share]
        tensors = sorted(t for d, t in state.totals.worst if d == dtype)
        for tensor in tensors or ["-"]:
            margin, case = state.totals.worst.get((dtype, tensor), (None, None))
            at = "" if case is None else FuzzCase.from_json(case).build().describe()
            table.add_row(*first, tensor, "-" if margin is None else f"{margin:.3f}", at)
            first = ["", "", ""]
    return table


def finding_lines(findings: list[Finding]) -> Text:
    return Text("\n".join(f"  {f.id}  {f.group.check}  {f.failure.message}" for f in findings))


def print_summary(console: Console, state: State, folder: str) -> None:
    """Table, each finding with its replay line, why it stopped, the verdict: in this order."""
    console.print(coverage_table(state))
    for finding in state.findings:
        console.print()
        print_finding(console, finding, folder)
    for fault, count in state.totals.faults.items():
        console.print(f"JUDGE FAILED  ({count} cases)  {fault}", highlight=False)
    if state.findings or state.totals.faults:
        console.print()
    if state.restarts:
        console.print(f"{state.restarts} workers were ended from outside and replaced", highlight=False)
    console.print(Text(f"stopped because {state.stopped}; seed {state.seed}, campaign {folder}"))
    console.print(headline(state))


def print_finding(console: Console, finding: Finding, folder: str = "") -> None:
    """One finding in the order in which it is read: verdict, place, evidence, cause, how to go on."""
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
    lines.append(
        f"  replay   flashcheck replay {folder + '/findings/' if folder else ''}{finding.id}"
        f"{'.json' if folder else ''}"
    )
    if finding.script:
        lines.append(f"  script   {finding.script}")
    console.print(Text("\n".join(lines)))
