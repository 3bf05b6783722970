"""Expected failures with reasons, from a TOML file; strict, so that a mended fault shows up.

::

    [[known]]
    kernel = "mine:attention"        # left out: any
    check = "backward.bound"
    dtype = "bf16"                   # left out: any
    reason = "dK loses the last key of a ragged tile"
    url = "https://example.org/issues/17"   # optional
"""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import pytest

from flashcheck.errors import ArgumentError, UnknownNameError
from flashcheck.pytest_plugin.cases import Case, must_fail


@dataclass(frozen=True, slots=True)
class Known:
    """One entry of the file."""

    check: str
    reason: str
    kernel: str | None = None
    dtype: str | None = None
    url: str | None = None

    def covers(self, case: Case) -> bool:
        return (
            self.check == case.check
            and self.kernel in (None, case.group.subject.name)
            and self.dtype in (None, case.group.dtype)
        )


def read_known(path: Path) -> list[Known]:
    """The entries; raises ArgumentError or UnknownNameError for a file that is not one."""
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ArgumentError(
            "--flashcheck-known-failures", path, f"a readable file ({error.strerror})"
        ) from None
    except tomllib.TOMLDecodeError as error:
        raise ArgumentError("--flashcheck-known-failures", path, f"valid TOML ({error})") from None
    for key in data:
        if key != "known":
            raise UnknownNameError(f"key of {path}", key, ["known"])
    return [_entry(path, entry) for entry in data.get("known", [])]


def _entry(path: Path, entry: dict[str, Any]) -> Known:
    names = [f.name for f in fields(Known)]
    for key, value in entry.items():
        if key not in names:
            raise UnknownNameError(f"key of [[known]] in {path}", key, names)
        if not isinstance(value, str) or not value.strip():
            raise ArgumentError(f"{key} of [[known]] in {path}", repr(value), "a text that is not empty")
    for key in ("check", "reason"):
        if key not in entry:
            raise ArgumentError(f"[[known]] in {path}", entry, f"a table with {key}")
    return Known(**entry)


def mark_known_failures(path: Path, items: Sequence[pytest.Item]) -> None:
    """Marks the tests that must fail.

    Raises pytest's UsageError for an entry that covers no test of a kernel that is collected: a typo, or a
    check that went away, would otherwise hide for ever.
    """
    from flashcheck.pytest_plugin import case_of

    cases = [(item, case) for item in items if (case := case_of(item)) is not None]
    kernels = {case.group.subject.name for _, case in cases}
    try:
        entries = read_known(path)
        for known in entries:
            covered = [item for item, case in cases if known.covers(case)]
            if cases and not covered and known.kernel in (None, *kernels):
                raise ArgumentError(
                    "--flashcheck-known-failures",
                    f"{known.check} {known.dtype or ''}".strip(),
                    f"a check and dtype that {known.kernel or 'some kernel'} has a test for",
                )
            for item in covered:
                item.add_marker(must_fail(known.reason + (f" ({known.url})" if known.url else "")))
    except ArgumentError as error:
        raise pytest.UsageError(f"flashcheck: {error}") from None
