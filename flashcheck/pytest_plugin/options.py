"""The plugin's options: the words of ``flashcheck certify`` behind ``--flashcheck-``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest


@dataclass(frozen=True, slots=True)
class Options:
    """As given; None or empty: the default of ``flashcheck certify``."""

    kernels: tuple[str, ...] = ()
    level: str | None = None
    dtypes: tuple[str, ...] = ()
    device: str | None = None
    seed: int | None = None
    max_cases: int | None = None
    max_time: str | None = None
    known_failures: Path | None = None
    report: Path | None = None


def add_options(parser: pytest.Parser) -> None:
    """Registers the options in a group of their own."""
    group = parser.getgroup("flashcheck", "flash-attention kernels against proved error bounds (flashcheck)")
    add = group.addoption
    add(
        "--flashcheck-kernel",
        action="append",
        default=[],
        metavar="KERNEL",
        help="module:attribute, path/file.py:attribute or a built-in name, for flashcheck.conformance; "
        "repeat for more. Default: kernels in [tool.flashcheck] of pyproject.toml.",
    )
    add("--flashcheck-level", metavar="LEVEL", help="quick or standard.")
    add(
        "--flashcheck-dtype",
        action="append",
        default=[],
        metavar="DTYPE",
        help="Only this dtype; repeatable.",
    )
    add("--flashcheck-device", metavar="DEVICE", help="cpu or cuda[:N]; xdist workers share out the GPUs.")
    add("--flashcheck-seed", type=int, metavar="N", help="Of all random draws; fixed by default.")
    add("--flashcheck-max-cases", type=int, metavar="N", help="Problems per dtype.")
    add("--flashcheck-max-time", metavar="TIME", help="Per kernel and dtype: 90s, 10m.")
    add(
        "--flashcheck-known-failures",
        metavar="FILE",
        help="TOML with expected failures and their reasons; one that passes fails the run.",
    )
    add("--flashcheck-report", metavar="DIR", help="Write a certificate per kernel there.")


def options_from(config: pytest.Config) -> Options:
    """The options of this run."""
    get = config.getoption
    known, report = get("flashcheck_known_failures"), get("flashcheck_report")
    return Options(
        kernels=tuple(get("flashcheck_kernel")),
        level=get("flashcheck_level"),
        dtypes=tuple(get("flashcheck_dtype")),
        device=get("flashcheck_device"),
        seed=get("flashcheck_seed"),
        max_cases=get("flashcheck_max_cases"),
        max_time=get("flashcheck_max_time"),
        known_failures=None if known is None else Path(known),
        report=None if report is None else Path(report),
    )
