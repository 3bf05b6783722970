"""Which failures are one bug: the same class of fault or, where none was diagnosed, the same check and look.

A class comes from the diagnosis, whose guesses were each proved by a second experiment. A small problem
can fit several, so a failure joins a group when *any* of its classes is among the group's.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Failure:
    """One failed check on one case; plain data.

    Attributes:
        check, tensor: what failed ("" where no one tensor is to blame); "crash" for a dead process.
        message: one line; evidence: further lines; where: the worst element in words.
        guesses: diagnoses that fit, likeliest first; faults: their classes, in the same order.
        margin: |error| / bound there, or None.
        digest: of the bits of everything the kernel returned: equal digests, equal bits.
    """

    check: str
    tensor: str
    message: str
    evidence: tuple[str, ...] = ()
    where: str = ""
    guesses: tuple[str, ...] = ()
    faults: tuple[str, ...] = ()
    margin: float | None = None
    digest: str = ""

    @property
    def classes(self) -> tuple[str, ...]:
        """Of fault, as diagnosed; or else the check and what the failure looks like."""
        look = f"{self.check}: {self.tensor} {_without_numbers(self.message)}"
        return self.faults or (" ".join(look.split()),)


def _without_numbers(text: str) -> str:
    text = re.sub(r"\([^)]*\)|\[[^\]]*\]|: [\d.e+-]+ x its bound$", "", text)
    return " ".join(re.sub(r"-?\d[\d.,e+-]*", "#", text).split())


@dataclass(frozen=True, slots=True)
class Group:
    """One bug: the check that showed it first, and the classes of fault that it fits."""

    check: str
    classes: tuple[str, ...]

    @property
    def id(self) -> str:
        return hashlib.sha256(self.classes[0].encode()).hexdigest()[:8]

    def holds(self, failure: Failure) -> bool:
        return bool(set(self.classes) & set(failure.classes))

    def narrowed(self, failure: Failure) -> Group:
        """Without the classes that a further failure of the same bug does not fit."""
        return Group(self.check, tuple(c for c in self.classes if c in failure.classes) or self.classes)


def group_of(failure: Failure, known: Iterable[Group]) -> Group:
    """The first known group that holds the failure, else a new one."""
    for group in known:
        if group.holds(failure):
            return group
    return Group(failure.check, failure.classes)
