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
NOTHING = 0.01
"""Share below which libraries fail with any error: they load code and take workspaces of their own."""
_WORDS = ("out of memory", "ALLOC_FAILED")


def ran_out_of_memory(error: BaseException) -> bool:
    """The device had too little memory, as torch says it: of its own allocator, the driver or a library."""
    told = isinstance(error, RuntimeError) and any(word in str(error) for word in _WORDS)
    return isinstance(error, torch.OutOfMemoryError) or told


def free_share(device: torch.device) -> float:
    """Free memory of ``device`` over all of it; 1 where that cannot be asked."""
    if device.type != "cuda":
        return 1.0
    try:
        free, total = torch.cuda.mem_get_info(device)
    except RuntimeError as error:
        return 0.0 if ran_out_of_memory(error) else 1.0  # not even a context finds room; or the GPU is lost
    return free / total


def others_hold_it(error: BaseException, device: torch.device) -> bool:
    """``error`` comes from a device whose memory other processes have filled: no verdict on the kernel."""
    return free_share(device) < (ENOUGH if ran_out_of_memory(error) else NOTHING)


def give_back(device: torch.device) -> None:
    """Returns what torch keeps of freed memory to the device, for the processes beside this one."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


def patiently(call: Callable[[], T], device: torch.device) -> T:
    """The result of ``call``, made again after a while where others left the device no memory.

    Raises what the last attempt raised.
    """
    for wait in WAITS:
        try:
            return call()
        except Exception as error:
            if not others_hold_it(error, device):
                raise
        give_back(device)
        time.sleep(wait)
    return call()
