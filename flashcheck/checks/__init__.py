"""The checks: named properties with a verdict, each usable alone.

``registry`` holds them; importing this package registers all of them.
"""

from __future__ import annotations

from flashcheck.checks import (
    accuracy,
    algorithm,
    bias,
    fresh_process,
    gradient_sums,
    gradients,
    influence,
    isolation,
    options,
    orders,
    placement,
    relations,
    repeat,
    rms,
    score_tests,
    special,
    unwritten,
)
from flashcheck.checks.judged import Judged, JudgeError, KernelError
from flashcheck.checks.record import Location, Record, Status
from flashcheck.checks.registry import CHECKS, Check, check_named

__all__ = [
    "CHECKS",
    "Check",
    "JudgeError",
    "Judged",
    "KernelError",
    "Location",
    "Record",
    "Status",
    "accuracy",
    "algorithm",
    "bias",
    "check_named",
    "fresh_process",
    "gradient_sums",
    "gradients",
    "influence",
    "isolation",
    "options",
    "orders",
    "placement",
    "relations",
    "repeat",
    "rms",
    "score_tests",
    "special",
    "unwritten",
]
