"""Hypothesis' database in a campaign: what failed is on disk, what a search climbs from is in memory.

Failures are replayed by every shard and by the next run. The best cases so far change with nearly every
case: writing them costs more than drawing a case, and a campaign's own files hold its records anyway.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from pathlib import Path

from hypothesis.database import DirectoryBasedExampleDatabase, ExampleDatabase, InMemoryExampleDatabase

from flashcheck.fuzz.signature import Focus

_CLIMBED = b".pareto"
"""End of the keys under which Hypothesis keeps what it climbs from."""


class Examples(ExampleDatabase):
    """Of the shards inside one focus, which draw alike: examples of others mean something else."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        self._failures = DirectoryBasedExampleDatabase(Path(folder))
        self._climbed = InMemoryExampleDatabase()

    def save(self, key: bytes, value: bytes) -> None:
        self._of(key).save(key, value)

    def fetch(self, key: bytes) -> Iterable[bytes]:
        return self._of(key).fetch(key)

    def delete(self, key: bytes, value: bytes) -> None:
        self._of(key).delete(key, value)

    def _of(self, key: bytes) -> ExampleDatabase:
        return self._climbed if key.endswith(_CLIMBED) else self._failures


@functools.cache
def examples_in(folder: str, focus: Focus) -> Examples:
    """The same object for all shards of a process inside one focus."""
    del focus  # the cache's key
    return Examples(folder)
