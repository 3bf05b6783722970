"""One thread within each torch operation: the problems are small."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from flashcheck.certify import one_thread


@pytest.fixture(autouse=True)
def single_thread() -> Iterator[None]:
    with one_thread():
        yield
