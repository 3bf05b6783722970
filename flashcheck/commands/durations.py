"""Durations as users write them."""

from __future__ import annotations

import re

from flashcheck.errors import ArgumentError


def seconds(text: str) -> float:
    """``90``, ``90s``, ``10m`` or ``2h`` in seconds; raises ArgumentError for anything else."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smh]?)", text.strip())
    if match is None:
        raise ArgumentError("--max-time", repr(text), "a number with s, m or h, such as 90s or 10m")
    return float(match[1]) * {"": 1, "s": 1, "m": 60, "h": 3600}[match[2]]
