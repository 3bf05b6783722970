"""Switches that turn single faults on, and count how often a fault's line ran."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable


class Switches:
    """The faults that are on. No fault on: the control.

    Attributes:
        hits: how often each fault's line ran. A mutant whose line never ran proves nothing about a check.
    """

    def __init__(self, active: Iterable[str] = ()) -> None:
        self.active = frozenset(active)
        self.hits: Counter[str] = Counter()

    def __call__(self, name: str) -> bool:
        """True where the fault is on; the caller's next line is the faulty one."""
        if name not in self.active:
            return False
        self.hits[name] += 1
        return True
