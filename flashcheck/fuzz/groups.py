"""Which failures are one bug.

A failure has *classes*: faults that the diagnosis proved, each by a second experiment; and *looks*: what
is wrong, in the fewest words. A class that many elements prove stands alone. Where few do (a small problem
fits several faults by chance) the looks count beside it, and where nothing is proved they are all there is.

A failure joins a group with which it shares a class or a look. The classes of a group are those that fit all
its failures; its looks are all that its failures showed.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass

STRONGEST = ("crash", "forward.bound", "backward.bound")
"""Checks whose failure says most; a finding of another check gives way to theirs."""


@dataclass(frozen=True, slots=True)
class Failure:
    """One failed check on one case; plain data.

    Attributes:
        check, tensor: what failed ("" where no one tensor is to blame); "crash" for a dead process.
        message: one line; evidence: further lines; where: the worst element in words.
        guesses: diagnoses that fit, likeliest first; faults: their classes, in the same order.
        looks: what is wrong, as a check and a tensor; empty where ``faults`` alone decide.
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
    looks: tuple[str, ...] = ()
    margin: float | None = None
    digest: str = ""

    @property
    def shown(self) -> tuple[str, ...]:
        """The looks by which it may be grouped; the message, numbers apart, where nothing else is known."""
        if self.looks or self.faults:
            return self.looks
        return (" ".join(f"{self.check}: {_without_numbers(self.message)}".split()),)


def _without_numbers(text: str) -> str:
    text = re.sub(r"\([^)]*\)|\[[^\]]*\]|: [\d.e+-]+ x its bound$", "", text)
    return " ".join(re.sub(r"-?\d[\d.,e+-]*", "#", text).split())


@dataclass(frozen=True, slots=True)
class Group:
    """One bug: the check that showed it, the classes of fault that it fits, what it looks like."""

    check: str
    classes: tuple[str, ...]
    looks: tuple[str, ...] = ()

    @property
    def id(self) -> str:
        return hashlib.sha256((*self.classes, *self.looks)[0].encode()).hexdigest()[:8]

    def holds(self, failure: Failure) -> bool:
        return bool(set(self.classes) & set(failure.faults) or set(self.looks) & set(failure.shown))

    def yields_to(self, failure: Failure) -> bool:
        """The failure says more than the group's own: the same bug, better shown."""
        return self.check not in STRONGEST and failure.check in STRONGEST

    def joined(self, failure: Failure) -> Group:
        """After a further failure: without classes that it does not fit, with the looks that it adds."""
        classes = tuple(c for c in self.classes if c in failure.faults) or self.classes
        looks = (*self.looks, *(x for x in failure.shown if self.looks and x not in self.looks))
        return Group(self.check, classes, looks)


def group_of(failure: Failure, known: Iterable[Group]) -> Group:
    """The first known group that holds the failure, else a new one."""
    for group in known:
        if group.holds(failure):
            return group
    return Group(failure.check, failure.faults, failure.shown)
