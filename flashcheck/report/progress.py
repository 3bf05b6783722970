"""Progress of a certification on stderr."""

from __future__ import annotations

from flashcheck.certify import Progress as Event
from flashcheck.report.counting import Counting


class ProgressReport(Counting):
    """Context manager; ``event`` takes what ``certify`` sends."""

    def event(self, event: Event, more: str = "") -> None:
        """``more``: what else is going on."""
        note = f"{event.case.spec.dtype} {event.case.spec.family}"
        if event.failures:
            note += f", {event.failures} kinds of failure"
        if more:
            note += f", {more}"
        self(event.done, event.total, note)
