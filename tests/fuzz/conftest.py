"""A runner without a process, for tests of what drives it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from flashcheck.fuzz.case import FuzzCase
from flashcheck.fuzz.groups import Group
from flashcheck.fuzz.judge import CaseReport, judge_case, with_gradient
from flashcheck.fuzz.runner import Subject
from flashcheck.kernel import Kernel
from flashcheck.problem import Problem


class InProcess:
    """Answers like a Runner."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self.calls = 0
        self.subject = Subject(kernel.name, kernel.capabilities, kernel.backward is not None, False, "")

    def judge(self, case: FuzzCase, known: Sequence[Group] = ()) -> CaseReport:
        self.calls += 1
        return judge_case(self.kernel, case, "cpu", known)

    def gradient(self, case: FuzzCase) -> Problem:
        return with_gradient(case, case.build(), self.kernel)

    def close(self) -> None:
        pass


@pytest.fixture
def in_process() -> Callable[[Kernel], InProcess]:
    return InProcess
