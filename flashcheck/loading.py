"""Finds a kernel by the name that a user types."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from flashcheck.adapters import BUILT_IN
from flashcheck.errors import ArgumentError, UnknownNameError
from flashcheck.kernel import Kernel, as_kernel


def load(name: str) -> Kernel:
    """The kernel called ``name``.

    ``name`` is a built-in name (``torch.sdpa.flash``), ``package.module:attribute`` or
    ``path/file.py:attribute``. Raises ArgumentError or UnknownNameError, which say what is legal.
    """
    if name in BUILT_IN:
        return BUILT_IN[name]()
    return as_kernel(attribute_of(name), name)


def attribute_of(name: str) -> object | None:
    """What the name stands for, as its module has it; None for a built-in kernel. Raises as ``load`` does."""
    if name in BUILT_IN:
        return None
    module_name, _, attribute = name.partition(":")
    if not attribute:
        raise UnknownNameError(
            "KERNEL", name, [*BUILT_IN, "package.module:attribute", "path/file.py:attribute"]
        )
    module = _import(module_name, name)
    if not hasattr(module, attribute):
        public = [x for x in vars(module) if not x.startswith("_")]
        raise UnknownNameError(f"attribute of {module_name}", attribute, public)
    value: object = getattr(module, attribute)
    return value


def _import(module_name: str, asked: str) -> ModuleType:
    if module_name.endswith(".py"):
        path = Path(module_name)
        if not path.is_file():
            raise ArgumentError("KERNEL", asked, "path/file.py:attribute where the file exists")
        spec = importlib.util.spec_from_file_location(path.stem, path)
        if spec is None or spec.loader is None:
            raise ArgumentError("KERNEL", asked, "a Python file that can be imported")
        module = importlib.util.module_from_spec(spec)
        sys.modules[path.stem] = module
        spec.loader.exec_module(module)
        return module
    if str(Path.cwd()) not in sys.path:  # as `python -m` and pytest do
        sys.path.insert(0, str(Path.cwd()))
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is not None and module_name.startswith(error.name):
            raise ArgumentError("KERNEL", asked, "package.module:attribute of an importable module") from None
        raise
