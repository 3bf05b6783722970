"""What a check returns."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Status(StrEnum):
    """Verdict of one check on one problem, or on a group of problems."""

    PASS = "pass"
    FAIL = "fail"
    NOT_APPLICABLE = "not applicable"


@dataclass(frozen=True, slots=True)
class Location:
    """One element of an output tensor, with the values that were compared there.

    Attributes:
        tensor: ``O`` or ``LSE``.
        index: (batch, head, row, column); without the column for LSE.
        got, exact: the kernel's value and the oracle's.
        bound: largest accepted |got - exact|.
        margin: |got - exact| / bound; inf where the bound is 0 or a NaN is not accepted.
    """

    tensor: str
    index: tuple[int, ...]
    got: float
    exact: float
    bound: float
    margin: float

    def describe(self) -> str:
        """``O[0,3,127,5]: got 0x1.8p-7, exact 0x1.2c4p-7, |error| 2.56e-3 > bound 1.49e-3``."""
        place = f"{self.tensor}[{','.join(str(i) for i in self.index)}]"
        error = abs(self.got - self.exact)
        relation = ">" if self.margin > 1 else "<="
        return (
            f"{place}: got {self.got.hex()}, exact {self.exact.hex()}, "
            f"|error| {error:.3g} {relation} bound {self.bound:.3g}"
        )


@dataclass(frozen=True, slots=True)
class Record:
    """The verdict of one check.

    Attributes:
        check: the check's name.
        status: pass, fail or not applicable.
        message: one line: what is wrong, or why the check does not apply.
        margin: worst |error| / bound, where the check has one.
        where: the worst element.
        evidence: further lines for a reader, most telling first.
        problem: the problem's line.
    """

    check: str
    status: Status
    message: str = ""
    margin: float | None = None
    where: Location | None = None
    evidence: tuple[str, ...] = ()
    problem: str = ""

    @property
    def failed(self) -> bool:
        return self.status is Status.FAIL
