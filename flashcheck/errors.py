"""Errors that a user can act on: they name the argument, what it was, and what is legal."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class ArgumentError(ValueError):
    """An argument is outside its legal set.

    The message names the argument, the value it had and the legal values, in that order.
    """

    def __init__(self, argument: str, got: object, legal: str) -> None:
        self.argument = argument
        self.got = got
        self.legal = legal
        super().__init__(f"{argument} = {got}: expected {legal}")


class UnknownNameError(ArgumentError):
    """A name is not in a known set; the message suggests the nearest known ones."""

    def __init__(self, argument: str, got: str, known: Iterable[str]) -> None:
        names = sorted(known)
        close = difflib.get_close_matches(got, names, n=3)
        hint = f" (did you mean {', '.join(close)}?)" if close else ""
        super().__init__(argument, repr(got), f"one of {', '.join(names)}{hint}")


class UnusableError(ArgumentError):
    """A kernel of a known name cannot run here; ``reason`` says why, in one line."""

    def __init__(self, kernel: str, reason: str) -> None:
        self.reason = reason
        super().__init__("KERNEL", kernel, f"a kernel that can run here; {reason}")
