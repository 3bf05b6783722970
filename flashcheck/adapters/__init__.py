"""Kernels that others ship, by the names that users type."""

from __future__ import annotations

from collections.abc import Callable

from flashcheck.kernel import Kernel

BUILT_IN: dict[str, Callable[[], Kernel]] = {}
"""Name -> maker. Adapters import what they wrap only when their maker is called."""
