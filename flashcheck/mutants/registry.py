"""The seeded faults by name: what each is, who reported it, what exposes it, who must catch it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from flashcheck.arithmetic import IEEE, Arithmetic, flash
from flashcheck.errors import UnknownNameError
from flashcheck.kernel import Capabilities, Kernel
from flashcheck.mutants.flash import TILE, FlashForward
from flashcheck.mutants.gradients import FlashBackward
from flashcheck.mutants.switches import Switches
from flashcheck.problem import OPTIONS, Problem

CAPABILITIES = Capabilities(
    dtypes=("fp16", "bf16", "fp32"),
    options=OPTIONS,
    causal=("top_left", "bottom_right"),
    head_dim=(1, 256),
    value_dim_differs=True,
    gqa=True,
    lse=True,
    empty_rows=True,
    cross_lengths=True,
    zero_length=True,
    any_strides=True,
    isolates_nonfinite=True,
    deterministic=True,
    batch_invariant=True,
    rejects_illegal=True,
    devices=("cpu",),
    gradients=("dq", "dk", "dv", "dbias", "dsink"),
    dlse=True,
)
"""What the control supports, and every mutant declares."""


@dataclass(frozen=True, slots=True)
class Mutant:
    """A kernel with one seeded fault.

    Attributes:
        name: also the name of its switch.
        fault: one sentence.
        source: public reports of this fault ("" for a fault of the same kind as reported ones).
        letter: class of the fault, a key of ``checks.fault_classes.FAULT_CLASSES``.
        exposed_by: which inputs show it.
        caught_by: the check that must fail.
        expose: problems to run in order on one kernel; the last shows the fault.
        splits: parts of the key range.
        tiling_known: the mutant declares its tiling, so that the very bits of its output are predicted.
    """

    name: str
    fault: str
    source: str
    letter: str
    exposed_by: str
    caught_by: str
    expose: Callable[[], tuple[Problem, ...]]
    splits: int = 1
    tiling_known: bool = True

    def make(self) -> Kernel:
        """The mutant as a kernel under test; it declares what the control declares."""
        return self.make_with(Switches([self.name]))

    def make_with(self, switches: Switches) -> Kernel:
        """The same with switches that the caller can read."""
        return kernel_with(f"mutant.{self.name}", switches, self.splits, self.tiling_known)


def control(splits: int = 1, tiling_known: bool = True) -> Kernel:
    """The kernel without a fault."""
    return kernel_with("mutant.none", Switches(), splits, tiling_known)


def kernel_with(name: str, switches: Switches, splits: int = 1, tiling_known: bool = True) -> Kernel:
    """The kernel with these faults; it declares what the control declares."""

    def declared(problem: Problem) -> Arithmetic:
        return flash(
            problem.format,
            block_keys=TILE if tiling_known else None,
            block_queries=TILE if tiling_known else None,
            order="ascending" if tiling_known else "unknown",
            scale_placement="scores",
            splits=splits,
        )

    forward = FlashForward(switches, splits)
    return Kernel(
        name=name,
        forward=forward,
        backward=FlashBackward(switches),
        capabilities=CAPABILITIES,
        arithmetic=declared,
        machine=lambda device: IEEE,  # noqa: ARG005
        source="flashcheck.mutants",
        orders={"launches": forward.launches},
    )


MUTANTS: dict[str, Mutant] = {}


def register(
    name: str,
    letter: str,
    fault: str,
    exposed_by: str,
    expose: Callable[[], Problem | tuple[Problem, ...]],
    *,
    source: str = "",
    caught_by: str = "forward.bound",
    splits: int = 1,
    tiling_known: bool = True,
) -> None:
    """Adds a mutant."""

    def problems() -> tuple[Problem, ...]:
        with torch.no_grad():
            made = expose()
        return made if isinstance(made, tuple) else (made,)

    MUTANTS[name] = Mutant(name, fault, source, letter, exposed_by, caught_by, problems, splits, tiling_known)


def mutant_named(name: str) -> Mutant:
    """The mutant called ``name``; raises UnknownNameError for any other name."""
    try:
        return MUTANTS[name]
    except KeyError:
        raise UnknownNameError("mutant", name, MUTANTS) from None
