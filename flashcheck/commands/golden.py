"""Makes, verifies and runs golden vectors."""

from __future__ import annotations

import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

import flashcheck.golden.themes  # noqa: F401 - registers the groups
from flashcheck.commands.exit_codes import INTERRUPTED
from flashcheck.errors import ArgumentError, UnknownNameError
from flashcheck.golden import files
from flashcheck.golden.entry import GROUPS
from flashcheck.golden.run import Run, run
from flashcheck.report.counting import Counting

OK, DIFFERS, NOTHING = 0, 1, 3
_SHOWN = 10


def run_make(folder: Path, stdout: Console, stderr: Console) -> int:
    """Writes ``folder``/vectors and the manifest."""
    from flashcheck.golden.make import make

    _require_flint()
    started = time.perf_counter()
    try:
        with Counting(stderr, "golden make") as progress:
            counts = make(folder, progress)
    except KeyboardInterrupt:
        stderr.print("interrupted: run it again to go on")
        return INTERRUPTED
    size = sum(path.stat().st_size for path in (folder / "vectors").iterdir())
    stdout.print(
        f"{sum(counts.values())} problems in {len(counts)} groups, {size / 1e6:.1f} MB, "
        f"{time.perf_counter() - started:.0f} s: {folder / files.MANIFEST}",
        highlight=False,
    )
    return OK


def run_verify(folder: Path, count: int | None, seed: int, stdout: Console, stderr: Console) -> int:
    """Recomputes ``count`` problems (None: all)."""
    from flashcheck.golden.verify import sample, verify

    _require_flint()
    started = time.perf_counter()
    faults = [*files.damaged(folder)]
    if not faults:
        try:
            with Counting(stderr, "golden verify") as progress:
                verified = verify(sample(folder, count, seed), progress)
        except KeyboardInterrupt:
            stderr.print("interrupted")
            return INTERRUPTED
        faults += verified.faults
        stdout.print(
            f"{verified.problems} problems, {verified.values:,} values of 30 digits: two routes, "
            f"{len(faults)} differences, {time.perf_counter() - started:.0f} s",
            highlight=False,
        )
    for fault in faults[:_SHOWN]:
        stdout.print(fault, highlight=False, markup=False)
    if len(faults) > _SHOWN:
        stdout.print(f"and {len(faults) - _SHOWN} more")
    return DIFFERS if faults else OK


def run_kernel(
    name: str, folder: Path, groups: tuple[str, ...], device: str | None, stdout: Console, stderr: Console
) -> int:
    """Judges a kernel on the vectors."""
    from flashcheck.devices import choose_device, interpret_without_gpu
    from flashcheck.loading import load

    for group in groups:
        if group not in GROUPS:
            raise UnknownNameError("--group", group, GROUPS)
    interpret_without_gpu()
    kernel = load(name)
    with Counting(stderr, name) as progress:
        found = run(kernel, folder, groups, choose_device(device, kernel), progress)
    _print_run(name, found, stdout)
    if found.interrupted:
        return INTERRUPTED
    if found.failures:
        return DIFFERS
    return OK if found.judged else NOTHING


def _print_run(name: str, found: Run, stdout: Console) -> None:
    table = Table(box=None, header_style="bold")
    for column in ("group", "judged", "not applicable", "failed", "elements", "worst margin", "at"):
        table.add_column(column, justify="left" if column in ("group", "at") else "right")
    for group, tally in found.groups.items():
        failed = len({failure.split(" ")[0] for failure in tally.failures})
        table.add_row(
            group,
            str(tally.judged),
            str(tally.not_applicable.total()),
            str(failed),
            f"{tally.elements:,}",
            f"{tally.worst:.3f}" if tally.elements else "",
            tally.worst_at,
        )
    stdout.print(table)
    reasons = sum((tally.not_applicable for tally in found.groups.values()), start=type(found.arithmetics)())
    for reason, count in reasons.most_common():
        stdout.print(f"not applicable, {count}: {reason}", highlight=False)
    for arithmetic, count in found.arithmetics.most_common():
        stdout.print(f"judged by the bounds of {arithmetic}: {count}", highlight=False)
    for failure in found.failures[:_SHOWN]:
        stdout.print(failure, highlight=False, markup=False)
    if len(found.failures) > _SHOWN:
        stdout.print(f"and {len(found.failures) - _SHOWN} more")
    stdout.print(f"{name}: {found.judged} problems judged, {_verdict(found)}", highlight=False)


def _verdict(found: Run) -> str:
    if not found.judged:
        return "so nothing is said"
    if found.failures:
        return f"{len(found.failures)} tensors outside their bounds"
    return "everything inside its bound"


def _require_flint() -> None:
    try:
        import flint  # noqa: F401
    except ImportError:
        raise ArgumentError("python-flint", "not installed", "pip install flashcheck[golden]") from None
