"""Chooses where kernels run."""

from __future__ import annotations

import os

from flashcheck.errors import ArgumentError
from flashcheck.kernel import Kernel

INTERPRET = "TRITON_INTERPRET"


def interpret_without_gpu() -> None:
    """Lets Triton kernels run in Triton's interpreter where there is no GPU.

    Must be called before the module of a kernel is imported: Triton decides at decoration. A value
    that the user set stays.
    """
    import torch

    if INTERPRET not in os.environ and not torch.cuda.is_available():
        os.environ[INTERPRET] = "1"


def device_lost() -> bool:
    """A GPU that this process used answers every call with an error, after a kernel's illegal access for
    instance: nothing that this process says of a kernel from now on means anything."""
    import torch

    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return False
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False


def choose_device(asked: str | None, kernel: Kernel) -> str:
    """The device to run on: the one asked for, else the first declared one that is present.

    Raises ArgumentError where the kernel does not declare the device, or it is not there.
    """
    import torch

    present = ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])
    declared = kernel.capabilities.devices
    usable = [d for d in ("cuda", "cpu") if d in declared and d in present]
    if asked is None:
        if not usable:
            raise ArgumentError(
                "--device", "not given", f"{' or '.join(declared)}, of which none is present here"
            )
        return usable[0]
    kind = asked.partition(":")[0]
    if kind not in usable:
        legal = ", ".join(usable) or "no device that is present"
        raise ArgumentError(
            "--device", asked, f"one that {kernel.name} declares and that is present: {legal}"
        )
    return asked
