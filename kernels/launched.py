"""Launches that recur: what the next call of the same kind need not form anew.

Calls that differ in nothing but what their tensors hold come a thousand times; on the host each would cost
more than a short one does on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from triton.compiler import CompiledKernel

_MOST = 256  # launches that are remembered in one place


def layout(x: Tensor) -> tuple[Any, ...]:
    """All that Triton compiles for in a tensor, and all that a descriptor says of it but its address."""
    return x.shape, x.stride(), x.dtype, x.data_ptr() % 16


class Launch:
    """One kernel with all arguments but tensors, for calls whose tensors have the same layouts.

    The first time Triton binds the arguments and looks the compiled kernel up; from then on that is launched.
    It depends on nothing else: fresh tensors start at multiples of 16 bytes.

    Args:
        grid: programs; descriptors: of the tensors that are read through them, or None where there is none;
        middle: the arguments between those that `run` takes, in two parts around its ``within``;
        constants: by name, launch options included.
    """

    __slots__ = ("_compiled", "_descriptors", "_grid", "_middle", "_tail", "constants")

    def __init__(
        self,
        grid: int,
        descriptors: Sequence[Any],
        middle: tuple[Sequence[Any], Sequence[Any]],
        constants: dict[str, Any],
    ) -> None:
        self._grid, self._middle, self.constants = grid, middle, constants
        self._descriptors = [
            None if x is None else (type(x), {name: y for name, y in vars(x).items() if name != "base"})
            for x in descriptors
        ]
        self._compiled: Any = None
        self._tail: tuple[Any, ...] = ()

    def run(
        self,
        kernel: Any,
        described: Sequence[Tensor],
        before: Sequence[Any],
        after: Sequence[Any] = (),
        within: Sequence[Any] = (),
    ) -> None:
        """Launch with descriptors of ``described``, ``before``, the middle, ``after`` and the constants.

        ``within``: tensors that stand in the midst of the middle, which itself keeps none alive.
        """
        arguments: list[Any] = []
        for known, x in zip(self._descriptors, described, strict=True):
            if known is None:
                arguments.append(None)
                continue
            # As its class would make it, without checking again what was checked of the same layout.
            made = object.__new__(known[0])
            made.__dict__.update(known[1], base=x)
            arguments.append(made)
        arguments += (*before, *self._middle[0], *within, *self._middle[1], *after)
        if self._compiled is not None:
            self._compiled[self._grid, 1, 1](*arguments, *self._tail)
            return
        found = kernel[(self._grid,)](*arguments, **self.constants)
        if isinstance(found, CompiledKernel):
            self._tail = tuple(self.constants[name] for name in kernel.arg_names[len(arguments) :])
            self._compiled = found


def remembered(known: dict[Any, Launch], key: tuple[Any, ...], make: Callable[[], Launch]) -> Launch:
    """What ``make`` gives, made once for a key, which holds all that it depends on."""
    found = known.get(key)
    if found is None:
        if len(known) >= _MOST:
            known.clear()
        found = known[key] = make()
    return found
