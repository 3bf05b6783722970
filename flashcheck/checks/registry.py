"""The checks by name; each is a plain function of a judged problem, usable alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from flashcheck.checks.fault_classes import fault_class
from flashcheck.checks.judged import Judged, KernelError
from flashcheck.checks.record import Record, Status
from flashcheck.errors import UnknownNameError
from flashcheck.kernel import Kernel
from flashcheck.problem import Problem

Judge = Callable[[Judged], Record]


@dataclass(frozen=True, slots=True)
class Check:
    """A named property.

    Attributes:
        name: ``family.property``.
        property: the property in words.
        faults: letters of the classes of public faults it is for (``fault_classes``).
        reruns: how many further kernel runs it costs, about.
        grouped: judged over groups of problems when a kernel is certified.
        judge: the verdict on a judged problem.
    """

    name: str
    property: str
    faults: str
    reruns: int
    grouped: bool
    judge: Judge

    def __call__(self, kernel: Kernel, problem: Problem, device: str = "cpu") -> Record:
        """The verdict on one problem, judged from scratch."""
        return self.on(Judged(kernel, problem, device))

    def on(self, judged: Judged) -> Record:
        """The verdict on a problem that other checks may have judged before.

        A kernel that refuses or breaks on a declared problem fails; JudgeError passes through.
        """
        try:
            return self.judge(judged)
        except KernelError as failure:
            return Record(self.name, Status.FAIL, str(failure), problem=judged.problem.describe())


CHECKS: dict[str, Check] = {}


def check(name: str, *, faults: str, reruns: int = 0, grouped: bool = False) -> Callable[[Judge], Check]:
    """Registers the decorated function; its docstring's first paragraph is the property.

    Raises UnknownNameError for a letter of ``faults`` that names no class of public faults.
    """
    for letter in faults:
        fault_class(letter)

    def register(judge: Judge) -> Check:
        words = " ".join((judge.__doc__ or "").split("\n\n", maxsplit=1)[0].split())
        CHECKS[name] = Check(name, words, faults, reruns, grouped, judge)
        return CHECKS[name]

    return register


def check_named(name: str) -> Check:
    """The check called ``name``; raises UnknownNameError for any other name."""
    try:
        return CHECKS[name]
    except KeyError:
        raise UnknownNameError("check", name, CHECKS) from None


def not_applicable(name: str, why: str) -> Record:
    return Record(name, Status.NOT_APPLICABLE, why)


def passed(name: str, judged: Judged, message: str = "") -> Record:
    return Record(name, Status.PASS, message, problem=judged.problem.describe())


def failed(name: str, judged: Judged, message: str, evidence: tuple[str, ...] = ()) -> Record:
    return Record(name, Status.FAIL, message, evidence=evidence, problem=judged.problem.describe())
