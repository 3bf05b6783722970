"""Imports what a kernel's library exports, or says in one line why the kernel cannot be used here."""

from __future__ import annotations

import importlib
from importlib import metadata
from typing import Any

from flashcheck.errors import UnusableError


def required(kernel: str, module: str, names: tuple[str, ...], install: str) -> tuple[Any, ...]:
    """``module``'s attributes ``names``.

    Raises UnusableError where the module is missing, cannot be imported (many need a GPU, or another release
    of torch, to be imported at all) or lacks one of the names.

    Args:
        kernel: the name that the user typed; install: how to get the module.
    """
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is not None and (module == error.name or module.startswith(f"{error.name}.")):
            raise UnusableError(kernel, f"{module} is not installed ({install})") from None
        raise UnusableError(kernel, f"importing {module} fails: {_line(error)}") from None
    except Exception as error:
        raise UnusableError(kernel, f"importing {module} fails: {_line(error)}") from None
    missing = [name for name in names if not hasattr(found, name)]
    if missing:
        raise UnusableError(kernel, f"{module} has no {', '.join(missing)} ({install})")
    return tuple(getattr(found, name) for name in names)


def version_of(module: str) -> str:
    """``module``'s version as it says itself; "" where it does not."""
    return str(getattr(importlib.import_module(module), "__version__", ""))


def installed(distribution: str) -> str | None:
    """The release of what pip calls ``distribution``; None where it is not installed."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _line(error: Exception) -> str:
    first = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {first}" if first else type(error).__name__
