"""``flashcheck list``: the registries, a line per entry."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from flashcheck.errors import ArgumentError, UnknownNameError, UnusableError
from flashcheck.problem import OPTIONS

if TYPE_CHECKING:
    from flashcheck.kernel import Kernel

Rows = list[tuple[str, str]]


def run_list(what: str | None, console: Console) -> int:
    """Prints one registry, or all; raises UnknownNameError for an unknown one."""
    if what is not None and what not in LISTS:
        raise UnknownNameError("WHAT", what, LISTS)
    for name in LISTS if what is None else (what,):
        table = Table(box=None, pad_edge=False, show_header=False, title=name, title_justify="left")
        table.add_column(no_wrap=True, style="bold")
        table.add_column()
        for row in LISTS[name]():
            table.add_row(*row)
        console.print(table)
        if what is None:
            console.print()
    return 0


def _kernels() -> Rows:
    from flashcheck.adapters import BUILT_IN
    from flashcheck.loading import load
    from flashcheck.settings import read_settings

    rows: Rows = []
    for name in (*BUILT_IN, *(k for k in read_settings(Path.cwd()).kernels if k not in BUILT_IN)):
        try:
            rows.append((name, _declared(load(name))))
        except UnusableError as error:
            rows.append((name, f"not here: {error.reason}"))
        except (ArgumentError, ImportError, RuntimeError) as error:
            rows.append((name, f"not here: {str(error).strip().partition(chr(10))[0]}"))
    return [*rows, ("package.module:attribute", "your own: a callable like scaled_dot_product_attention")]


def _declared(kernel: Kernel) -> str:
    """Where it runs, its dtypes, whether it has a backward, its options (or the few that it lacks)."""
    import torch

    c = kernel.capabilities
    present = [d for d in c.devices if d == "cpu" or torch.cuda.is_available()]
    where = "" if present else f"not here: needs {' or '.join(c.devices)}; "
    direction = "forward, backward" if kernel.backward is not None else "forward"
    lacking = [option for option in OPTIONS if option not in c.options]
    options = ", ".join(c.options) or "no options"
    if len(lacking) < len(c.options):
        options = "all options" + (f" but {', '.join(lacking)}" if lacking else "")
    return f"{where}{' '.join(c.dtypes)}; {direction}; {options}"


def _checks() -> Rows:
    from flashcheck.checks import CHECKS

    return [(c.name, f"{c.property} \\[faults {' '.join(c.faults)}]") for c in CHECKS.values()]


def _coverage() -> Rows:
    """Class of public faults -> the checks that are for it, and how many seeded faults it has."""
    from flashcheck.checks import CHECKS
    from flashcheck.checks.fault_classes import FAULT_CLASSES
    from flashcheck.mutants import MUTANTS

    rows: Rows = []
    for letter, known in FAULT_CLASSES.items():
        checks = [c.name for c in CHECKS.values() if letter in c.faults]
        mutants = sum(m.letter == letter for m in MUTANTS.values())
        seeded = f"; {mutants} seeded faults" if mutants else ""
        answer = ", ".join(checks) if checks else known.elsewhere
        rows.append((letter, f"{known.title}: {answer}{seeded}"))
    return rows


def _values() -> Rows:
    from flashcheck.inputs.values import FAMILIES

    return [(f.name, f.purpose) for f in FAMILIES.values()]


def _formats() -> Rows:
    from flashcheck.formats import FORMATS

    return [
        (
            f.name,
            f"{f.precision} significand bits, u = 2^-{f.precision}, normal from 2^{f.min_exponent}, "
            f"largest {f.max_finite:g}{', saturates' if f.saturates else ''}",
        )
        for f in FORMATS.values()
    ]


LISTS: dict[str, Callable[[], Rows]] = {
    "kernels": _kernels,
    "checks": _checks,
    "coverage": _coverage,
    "values": _values,
    "formats": _formats,
}
