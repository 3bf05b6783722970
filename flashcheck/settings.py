"""The ``[tool.flashcheck]`` table of the pyproject.toml in the current directory."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from flashcheck.errors import ArgumentError, UnknownNameError


@dataclass(frozen=True, slots=True)
class Settings:
    """Defaults of the command line.

    Attributes:
        kernels: certified when no kernel is named.
        level: of ``certify``.
    """

    kernels: tuple[str, ...] = ()
    level: str = "quick"


def read_settings(folder: Path) -> Settings:
    """The table in ``folder``; defaults where there is none.

    Raises UnknownNameError for an unknown key, ArgumentError for a value of the wrong kind.
    """
    path = folder / "pyproject.toml"
    if not path.is_file():
        return Settings()
    try:
        table: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise ArgumentError("pyproject.toml", str(path), f"valid TOML ({error})") from None
    own = table.get("tool", {}).get("flashcheck", {})
    known = {f.name for f in fields(Settings)}
    for key in own:
        if key not in known:
            raise UnknownNameError("[tool.flashcheck] key", key, known)
    kernels = own.get("kernels", [])
    if not (isinstance(kernels, list) and all(isinstance(k, str) for k in kernels)):
        raise ArgumentError("[tool.flashcheck] kernels", kernels, "a list of strings")
    level = own.get("level", Settings().level)
    if not isinstance(level, str):
        raise ArgumentError("[tool.flashcheck] level", level, "a string")
    return Settings(tuple(kernels), level)
