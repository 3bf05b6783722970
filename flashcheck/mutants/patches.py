"""Source patches of a kernel package: seeded faults as plain data, one text replaced in one file.

A patch file is TOML. At its top: ``kernel`` ("package:attribute"), and ``registers``, names that the package
registers with torch and that a second copy must not take again. Then a table ``[[patch]]`` each:

    name, class (a letter of ``checks.fault_classes``), fault, source (public reports), exposed_by
    file, old, new          old stands exactly once in the package's file
    caught_by               the check that must fail on the last of
    specs                   problems (fields of ``ProblemSpec``) that are run in order
    equivalent              in place of caught_by: why the patch changes no result
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flashcheck.checks import check_named
from flashcheck.checks.fault_classes import fault_class
from flashcheck.errors import ArgumentError, UnknownNameError
from flashcheck.inputs.spec import ProblemSpec


@dataclass(frozen=True, slots=True)
class Patch:
    """One seeded fault in the source of a kernel package.

    Attributes:
        name: unique among the patches read together.
        kernel: "package:attribute" of the honest kernel.
        registers: names that a copy of the package must not register again.
        file: path within the package; old: text that stands there once; new: what replaces it.
        fault: one sentence; source: public reports of it; exposed_by: which inputs show it.
        letter: class of the fault.
        caught_by: the check that must fail, "" for an equivalent patch.
        specs: problems to run in order on one kernel; the last shows the fault.
        equivalent: why the patch changes no result; "" for a fault.
    """

    name: str
    kernel: str
    registers: tuple[str, ...]
    file: str
    old: str
    new: str
    fault: str
    source: str
    exposed_by: str
    letter: str
    caught_by: str
    specs: tuple[ProblemSpec, ...]
    equivalent: str = ""

    @property
    def package(self) -> str:
        """The package that the patch is of."""
        return self.kernel.partition(":")[0].partition(".")[0]

    def applied(self, text: str) -> str:
        """``text`` of the file with the fault; ArgumentError where ``old`` does not stand there once."""
        count = text.count(self.old)
        if count != 1:
            raise ArgumentError(f"patch {self.name}", f"old text found {count} times in {self.file}", "once")
        return text.replace(self.old, self.new)


def read_patches(folder: Path) -> dict[str, Patch]:
    """The patches of every ``*.toml`` in ``folder``, by name.

    Raises ArgumentError or UnknownNameError, which name the file and what is legal there.
    """
    patches: dict[str, Patch] = {}
    files = sorted(folder.glob("*.toml"))
    if not files:
        raise ArgumentError("--patches", str(folder), "a folder with *.toml files")
    for path in files:
        try:
            data = tomllib.loads(path.read_text(encoding="utf-8"))
        except tomllib.TOMLDecodeError as error:
            raise ArgumentError("--patches", str(path), f"valid TOML ({error})") from None
        for entry in data.get("patch", []):
            patch = _patch(path, data, entry)
            if patch.name in patches:
                raise ArgumentError(f"name in {path.name}", patch.name, "a name that no other patch has")
            patches[patch.name] = patch
    return patches


_KEYS = frozenset(
    (
        "name",
        "class",
        "fault",
        "source",
        "exposed_by",
        "file",
        "old",
        "new",
        "caught_by",
        "specs",
        "equivalent",
    )
)


def _patch(path: Path, data: dict[str, Any], entry: dict[str, Any]) -> Patch:
    for key in entry:
        if key not in _KEYS:
            raise UnknownNameError(f"key in {path.name}", key, _KEYS)
    missing = [key for key in ("name", "class", "fault", "file", "old", "new", "specs") if key not in entry]
    if missing or "kernel" not in data:
        name = entry.get("name", "a patch")
        raise ArgumentError(f"{path.name}: {name}", f"no {', '.join(missing) or 'kernel'}", "it to be given")
    if ("caught_by" in entry) == ("equivalent" in entry):
        raise ArgumentError(f"{path.name}: {entry['name']}", "not exactly one of", "caught_by or equivalent")
    caught_by = str(entry.get("caught_by", ""))
    if caught_by:
        check_named(caught_by)
    return Patch(
        name=entry["name"],
        kernel=data["kernel"],
        registers=tuple(data.get("registers", ())),
        file=entry["file"],
        old=entry["old"],
        new=entry["new"],
        fault=entry["fault"],
        source=entry.get("source", ""),
        exposed_by=entry.get("exposed_by", ""),
        letter=fault_class(entry["class"]).letter,
        caught_by=caught_by,
        specs=tuple(ProblemSpec.from_json(spec) for spec in entry["specs"]),
        equivalent=entry.get("equivalent", ""),
    )
