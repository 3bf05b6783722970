"""Memory that other processes hold is no fault of the kernel: such a call is made again."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

import torch

T = TypeVar("T")

WAITS = (0.5, 2.0, 8.0)  # seconds before each further attempt
ENOUGH = 0.25
"""Share of the device's memory that is enough for any problem that is judged here: a kernel that fails for
want of memory while so much is free asked for too much."""


def ran_out_of_memory(error: BaseException) -> bool:
    """The device had too little memory, as torch says it: of its own allocator or of the driver."""
    told = isinstance(error, RuntimeError) and "out of memory" in str(error)
    return isinstance(error, torch.OutOfMemoryError) or told


def free_share(device: torch.device) -> float:
    """Free memory of ``device`` over all of it; 1 where that cannot be asked."""
    if device.type != "cuda":
        return 1.0
    try:
        free, total = torch.cuda.mem_get_info(device)
    except RuntimeError:
        return 0.0  # not even a context finds room
    return free / total


def patiently(call: Callable[[], T], device: torch.device) -> T:
    """The result of ``call``, made again after a while where others left the device no memory.

    Raises what the last attempt raised.
    """
    for wait in WAITS:
        try:
            return call()
        except Exception as error:
            if not ran_out_of_memory(error) or free_share(device) >= ENOUGH:
                raise
        if device.type == "cuda":
            torch.cuda.empty_cache()
        time.sleep(wait)
    return call()
