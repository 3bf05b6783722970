"""A runner without a process, for tests of what drives it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from flashcheck.fuzz.runner import InProcessRunner
from flashcheck.kernel import Kernel


@pytest.fixture
def in_process() -> Callable[[Kernel], InProcessRunner]:
    return InProcessRunner
