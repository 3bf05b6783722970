"""A second copy of a kernel package, under another name, with one patch: it stands beside the clean one."""

from __future__ import annotations

import importlib
import importlib.util
import itertools
import re
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from flashcheck.errors import ArgumentError
from flashcheck.kernel import Kernel
from flashcheck.loading import load
from flashcheck.mutants.patches import Patch

_COPIES = itertools.count(1)


def package_folder(package: str) -> Path:
    """Where the source of a package lies. Raises ArgumentError where there is none."""
    if str(Path.cwd()) not in sys.path:  # as `python -m` does
        sys.path.insert(0, str(Path.cwd()))
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise ArgumentError("patched package", package, "an importable package with its source")
    return Path(next(iter(spec.submodule_search_locations)))


def patched_text(patch: Patch) -> str:
    """The file with the fault in it. Raises ArgumentError where the patch does not apply any more."""
    path = package_folder(patch.package) / patch.file
    if not path.is_file():
        raise ArgumentError(f"patch {patch.name}", f"no file {patch.file}", f"a file of {patch.package}")
    return patch.applied(path.read_text(encoding="utf-8"))


@contextmanager
def patched_kernel(patch: Patch) -> Iterator[Kernel]:
    """The kernel with the fault, loaded from a temporary copy of its package.

    The copy's source lies on the disk for as long as the kernel is used: Triton reads it late.
    Raises ArgumentError where the patch does not apply.
    """
    text = patched_text(patch)
    name = f"{patch.package}_patched_{next(_COPIES)}"
    with TemporaryDirectory(prefix="flashcheck-patch-") as folder:
        copy = Path(folder) / name
        shutil.copytree(package_folder(patch.package), copy, ignore=shutil.ignore_patterns("__pycache__"))
        (copy / patch.file).write_text(text, encoding="utf-8")
        for path in copy.rglob("*.py"):
            path.write_text(_renamed(path.read_text(encoding="utf-8"), patch, name), encoding="utf-8")
        sys.path.insert(0, folder)
        importlib.invalidate_caches()
        try:
            yield load(patch.kernel.replace(patch.package, name, 1))
        finally:
            sys.path.remove(folder)
            for module in [m for m in sys.modules if m == name or m.startswith(f"{name}.")]:
                del sys.modules[module]


def _renamed(text: str, patch: Patch, name: str) -> str:
    """Imports of the package lead into the copy, and what it registers has a name of its own."""
    text = re.sub(rf"^(\s*(?:from|import) ){patch.package}\b", rf"\g<1>{name}", text, flags=re.M)
    for registered in patch.registers:
        text = re.sub(rf"\b{re.escape(registered)}\b", f"{registered}_{name}", text)
    return text
