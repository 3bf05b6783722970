"""The seeded faults as kernels with names: ``flashcheck.fuzz.mutant_kernels:NAME`` (``.`` written ``__``).

``none`` is the emulator without a fault.
"""

from __future__ import annotations

from flashcheck.kernel import Kernel
from flashcheck.mutants import MUTANTS
from flashcheck.mutants.registry import control


def __getattr__(name: str) -> Kernel:
    if name == "none":
        return control()
    mutant = MUTANTS.get(name) or MUTANTS.get(name.replace("__", "."))
    if mutant is None:
        raise AttributeError(name)
    return mutant.make()


def __dir__() -> list[str]:
    return ["none", *(name.replace(".", "__") for name in MUTANTS)]
