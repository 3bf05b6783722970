"""The mean of ratios."""

from __future__ import annotations

import math
from collections.abc import Iterable


def geometric_mean(values: Iterable[float | None]) -> float | None:
    """Of those that there are; None if there are none."""
    logs = [math.log(x) for x in values if x is not None]
    return math.exp(sum(logs) / len(logs)) if logs else None
