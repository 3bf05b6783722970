"""Which failures are one bug: same check, same class of fault.

The class comes from the diagnosis, whose guesses were each proved by a second experiment. A small problem
can fit several guesses, so a failure joins a group when *any* of its guesses is among the group's.
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
        guesses: diagnoses that fit, likeliest first.
        margin: |error| / bound there, or None.
        digest: of the bits of everything the kernel returned: equal digests, equal bits.
    """

    check: str
    tensor: str
    message: str
    evidence: tuple[str, ...] = ()
    where: str = ""
    guesses: tuple[str, ...] = ()
    margin: float | None = None
    digest: str = ""

    @property
    def classes(self) -> tuple[str, ...]:
        """Classes of fault: the guesses without their numbers, or else what the failure looks like."""
        if self.guesses:
            return tuple(dict.fromkeys(_without_numbers(guess) for guess in self.guesses))
        return (f"{self.tensor} {_without_numbers(self.message)}".strip(),)


def _without_numbers(text: str) -> str:
    # "the ragged tail (keys 64..70, tile 16) is lost" and its neighbours are one class.
    text = re.sub(r"\([^)]*\)|\[[^\]]*\]|: [\d.e+-]+ x its bound$", "", text)
    return " ".join(re.sub(r"-?\d[\d.,e+-]*", "#", text).split())


@dataclass(frozen=True, slots=True)
class Group:
    """One bug: the check that shows it and the classes of fault that its first failure fits."""

    check: str
    classes: tuple[str, ...]

    @property
    def id(self) -> str:
        text = f"{self.check}\n{self.classes[0]}"
        return hashlib.sha256(text.encode()).hexdigest()[:8]

    def holds(self, failure: Failure) -> bool:
        return failure.check == self.check and bool(set(self.classes) & set(failure.classes))


def group_of(failure: Failure, known: Iterable[Group]) -> Group:
    """The first known group that holds the failure, else a new one."""
    for group in known:
        if group.holds(failure):
            return group
    return Group(failure.check, failure.classes)
