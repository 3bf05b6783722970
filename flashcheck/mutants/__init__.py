"""Seeded faults: kernels that the checks must reject. ``MUTANTS`` holds them by name."""

from __future__ import annotations

from flashcheck.mutants import backward_faults as backward_faults
from flashcheck.mutants import forward_faults as forward_faults
from flashcheck.mutants import relational_faults as relational_faults
from flashcheck.mutants.registry import MUTANTS, Mutant, control, mutant_named

__all__ = ["MUTANTS", "Mutant", "control", "mutant_named"]
