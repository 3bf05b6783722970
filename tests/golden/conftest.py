"""The recorded vectors, read once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import flashcheck.golden.themes  # noqa: F401 - registers the groups
from flashcheck.golden import files
from flashcheck.golden.entry import GROUPS

FOLDER = Path(__file__).parents[2] / "golden"


@pytest.fixture(scope="session")
def groups() -> dict[str, Any]:
    return {name: files.read_group(FOLDER, name) for name in GROUPS}


@pytest.fixture(scope="session")
def problems(groups: dict[str, Any]) -> dict[str, Any]:
    """Every problem by id."""
    return {p["id"]: p for group in groups.values() for p in group["problems"]}
