"""Files that survive a kill and may be shared by processes: whole or absent, or whole lines."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from flashcheck.files import write_atomically


def write_json(path: Path, data: Any) -> None:
    write_atomically(path, json.dumps(data, indent=1, allow_nan=True) + "\n")


class Lines:
    """An append-only file of JSON lines; one write a line, so that a kill can cut only the last one."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def append(self, data: Any) -> None:
        os.write(self._descriptor, (json.dumps(data, separators=(",", ":")) + "\n").encode())

    def close(self) -> None:
        os.close(self._descriptor)


def read_lines(path: Path) -> Iterator[Any]:
    """The whole lines of a file; a last one that a kill has cut is left out."""
    with path.open(encoding="utf-8") as stream:
        for line in stream:
            if line.endswith("\n"):
                with contextlib.suppress(json.JSONDecodeError):
                    yield json.loads(line)


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Holds the lock that ``path`` stands for, against other processes; a kill frees it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(stream, fcntl.LOCK_UN)
