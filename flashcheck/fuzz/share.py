"""How many processes share a machine: its cores, its GPUs and their memory."""

from __future__ import annotations

import os
import subprocess

MOST_ON_CPU = 8
MOST_ON_A_GPU = 12
"""Workers by default. The kernel of a case takes a millisecond and its judge, on a core, some fifty: a GPU
has room for many. Measured were no more than these."""

MOST_HELPERS = 4
"""That compile ahead, by default."""

GPU_GIB = 2.0
"""GPU memory that a worker may need: 0.5 GiB for its context, the rest for cases and what a kernel keeps.
`isolation.wide_strides` takes more for a moment, and waits where there is none."""

_SMI = ("nvidia-smi", "--query-gpu=memory.free", "--format=csv,noheader,nounits")
_SMI_SECONDS = 10.0

_ONE_THREAD = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "TORCHINDUCTOR_COMPILE_THREADS")


def one_thread_each() -> None:
    """Makes processes that are started from now on compute with one thread: each worker has one core.

    torch is told so by the workers; this is for numpy (Triton's interpreter) and for inductor, which starts a
    pool of compilers in every process. What the user has set stays.
    """
    for name in _ONE_THREAD:
        os.environ.setdefault(name, "1")


def default_helpers(device: str) -> int:
    """Processes that compile ahead: a quarter of the cores on a GPU, none elsewhere."""
    return min(MOST_HELPERS, max(1, cores() // 4)) if device.startswith("cuda") else 0


def default_workers(device: str) -> int:
    """Workers that a machine has room for.

    On GPUs: the cores that helpers leave, so many on each as its free memory holds; one at least.
    """
    if not device.startswith("cuda"):
        return min(MOST_ON_CPU, cores())
    count = gpus() if device == "cuda" else 1
    memory = free_gib()
    fit = MOST_ON_A_GPU if memory is None else int(memory / GPU_GIB)
    return max(1, min(cores() - default_helpers(device), count * min(MOST_ON_A_GPU, fit)))


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def gpus() -> int:
    """GPUs that are visible here."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([x for x in visible.split(",") if x.strip()])
    import torch

    return torch.cuda.device_count()


def free_gib() -> float | None:
    """Free memory of the fullest GPU of the machine; None where nobody can say.

    Asked of the driver's tool: torch would make a context of its own for as long as this process runs.
    """
    try:
        done = subprocess.run(_SMI, capture_output=True, text=True, timeout=_SMI_SECONDS, check=True)
        return min(float(line) for line in done.stdout.split()) / 1024.0
    except (OSError, subprocess.SubprocessError, ValueError):
        return None
