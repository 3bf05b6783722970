"""Profiles for this repository's own tests, registered by its conftest alone."""

from __future__ import annotations

from pathlib import Path

from hypothesis import settings

ROOT = Path(__file__).parents[2]


def test_what_the_profiles_promise() -> None:
    ci, dev, nightly = (settings.get_profile(name) for name in ("ci", "dev", "nightly"))
    assert ci.derandomize
    assert ci.database is None
    assert not dev.derandomize
    assert not nightly.derandomize
    assert nightly.database is not None
    assert nightly.max_examples > dev.max_examples


def test_the_package_registers_none() -> None:
    for path in (ROOT / "flashcheck").rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        assert "register_profile" not in text, path
        assert "load_profile" not in text, path
