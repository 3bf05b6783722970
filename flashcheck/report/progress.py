"""Progress on stderr: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from flashcheck.certify import Progress as Event

SECONDS_BETWEEN_LINES = 30.0


class ProgressReport:
    """Context manager; call it with every event."""

    def __init__(self, console: Console, kernel: str, quiet: bool) -> None:
        self.console = console
        self.kernel = kernel
        self.quiet = quiet
        self.last = time.monotonic()
        self.bar: Progress | None = None
        if console.is_terminal and not quiet:
            self.bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeRemainingColumn(),
                TextColumn("{task.fields[note]}"),
                console=console,
                transient=True,
            )

    def __enter__(self) -> ProgressReport:
        if self.bar is not None:
            self.bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.bar is not None:
            self.bar.stop()

    def __call__(self, event: Event) -> None:
        note = f"{event.case.spec.dtype} {event.case.spec.family}"
        if event.failures:
            note += f", {event.failures} kinds of failure"
        if self.bar is not None:
            if not self.bar.tasks:
                self.bar.add_task(self.kernel, total=event.total, note=note)
            self.bar.update(self.bar.tasks[0].id, completed=event.done, note=note)
        elif not self.quiet and time.monotonic() - self.last >= SECONDS_BETWEEN_LINES:
            self.last = time.monotonic()
            self.console.print(
                f"{self.kernel}: {event.done} of {event.total} problems ({note})", highlight=False
            )
