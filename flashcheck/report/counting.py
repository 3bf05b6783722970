"""Progress of work that is counted in problems: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

SECONDS_BETWEEN_LINES = 30.0


class LineTimer:
    """Says when the next line is due, where progress is shown as lines."""

    def __init__(self) -> None:
        self._last = time.monotonic()

    def due(self) -> bool:
        """True once every ``SECONDS_BETWEEN_LINES``."""
        now = time.monotonic()
        if now - self._last < SECONDS_BETWEEN_LINES:
            return False
        self._last = now
        return True


class Counting:
    """Context manager; call it with (done, total, what was done last). ``quiet``: it shows nothing."""

    def __init__(self, console: Console, name: str, quiet: bool = False) -> None:
        self.console, self.name, self.quiet = console, name, quiet
        self.timer = LineTimer()
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

    def __enter__(self) -> Self:
        if self.bar is not None:
            self.bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.bar is not None:
            self.bar.stop()

    def __call__(self, done: int, total: int, note: str) -> None:
        if self.bar is not None:
            if not self.bar.tasks:
                self.bar.add_task(self.name, total=total, note=note)
            self.bar.update(self.bar.tasks[0].id, completed=done, note=note)
        elif not self.quiet and self.timer.due():
            self.console.print(f"{self.name}: {done} of {total} problems ({note})", highlight=False)
