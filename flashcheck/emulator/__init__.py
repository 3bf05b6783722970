"""A tiled flash attention on float32 tensors that rounds exactly where an Arithmetic says.

It is an honest kernel for every declaration: the witness of the bounds and the platform of the audit.
Errors that a Machine leaves open (special functions) are deterministic functions of their arguments.

Files to know: ``units`` (sums), ``functions`` (exp, log, division, tanh), ``scores`` (the tile and its
exponents), ``forward``, ``backward``.
"""

from __future__ import annotations

from collections.abc import Callable

from flashcheck.arithmetic import ARITHMETICS, HOPPER, IEEE, Arithmetic, Machine
from flashcheck.emulator.backward import backward
from flashcheck.emulator.forward import forward
from flashcheck.emulator.tiles import concrete
from flashcheck.kernel import GRADIENT_NAMES, Capabilities, Kernel
from flashcheck.problem import OPTIONS


def as_kernel(arithmetic: Arithmetic, machine: Machine = IEEE, *, name: str) -> Kernel:
    """The emulation as a kernel under test, with every option of the contract.

    Tile sizes and order that ``arithmetic`` leaves open are decided, and declared: 64, ascending.
    """
    declared = concrete(arithmetic)
    return Kernel(
        name=name,
        forward=lambda problem: forward(problem, declared, machine),
        backward=lambda problem, out, lse: backward(problem, out, lse, declared, machine),
        capabilities=Capabilities(
            dtypes=(declared.input_format.name,),
            options=OPTIONS,
            causal=("top_left", "bottom_right"),
            head_dim=(1, 512),
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
            devices=("cpu",),
            gradients=GRADIENT_NAMES,
            dlse=True,
        ),
        arithmetic=lambda problem: declared,  # noqa: ARG005
        machine=lambda device: machine,  # noqa: ARG005
        source="flashcheck.emulator",
    )


def _maker(arithmetic: Arithmetic, machine: Machine, name: str) -> Callable[[], Kernel]:
    return lambda: as_kernel(arithmetic, machine, name=name)


KERNELS: dict[str, Callable[[], Kernel]] = {
    f"{prefix}.{preset}": _maker(arithmetic, machine, f"{prefix}.{preset}")
    for prefix, machine in (("emulator", IEEE), ("emulator.hopper", HOPPER))
    for preset, arithmetic in ARITHMETICS.items()
}
"""One kernel per preset and machine, by the names that users type."""
