"""Compiles ahead: processes that call the kernel once for each signature of a shard that is to come.

What they compile reaches the workers through the compiler's own cache on disk (Triton's, inductor's).
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from flashcheck.fuzz.case import FuzzCase
from flashcheck.fuzz.hunter import Shard
from flashcheck.fuzz.runner import KernelLoadError, Runner
from flashcheck.fuzz.signature import samples
from flashcheck.fuzz.worker import WorkerTask

_PATIENCE = 1.0
"""Seconds that helpers have to end by themselves once their pipes are closed."""


@contextlib.contextmanager
def helping(kernel: str, device: str, limit: float, log: Path) -> Iterator[Runner]:
    """The kernel in a process of its own, for a helper process of which nobody waits for an answer: it ends
    without a word where the other end of its pipe goes away, or the kernel cannot be loaded."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # whoever started the helper decides when to stop
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # this process must not touch the GPU
    import torch

    torch.set_num_threads(1)
    runner = Runner(kernel, device, limit, log)
    with contextlib.suppress(EOFError, ConnectionError, KernelLoadError):
        yield runner
    runner.close()


def dismiss(helpers: Sequence[tuple[Any, Connection]]) -> None:
    """Closes the helpers' pipes, which ends them; those that have not ended soon after are killed."""
    for _, pipe in helpers:
        pipe.close()
    until = time.monotonic() + _PATIENCE
    for process, _ in helpers:
        process.join(max(0.0, until - time.monotonic()))
        if process.is_alive():
            process.kill()
            process.join()


def compile_shards(task: WorkerTask, pipe: Connection) -> None:
    """For each shard received: ("compiled", (number, signatures, seconds))."""
    log = task.store.folder / "logs" / f"{task.store.run}-{task.worker}.log"
    done: set[FuzzCase] = set()
    with helping(task.kernel, task.device, task.limit, log) as runner:
        subject = runner.subject
        while (shard := pipe.recv()) is not None:
            seconds, count = 0.0, 0
            for spec in samples(shard.focus, subject.capabilities, subject.has_backward, shard.number):
                case = FuzzCase(spec, ("backward",) if subject.has_backward else ())
                if replace(case, spec=replace(spec, seed=0)) not in done:
                    done.add(replace(case, spec=replace(spec, seed=0)))
                    seconds += runner.compile(case)
                    count += 1
                if pipe.poll():
                    break  # the next shard is more urgent than the rest of this one
            pipe.send(("compiled", (shard.number, count, seconds)))


class Ahead:
    """The processes, and who compiles what; nothing at all where ``count`` is 0."""

    def __init__(self, context: Any, task: WorkerTask, count: int) -> None:
        self.seconds = 0.0
        self.signatures = 0
        self._next = 0
        self._workers: list[tuple[Any, Connection]] = []
        for number in range(count):
            ours, theirs = context.Pipe()
            own = replace(task, worker=f"ahead-{number}")
            process = context.Process(target=compile_shards, args=(own, theirs))
            process.start()
            theirs.close()
            self._workers.append((process, ours))

    def __bool__(self) -> bool:
        return bool(self._workers)

    def give(self, shard: Shard) -> None:
        """Hands the shard to the next process in turn."""
        with contextlib.suppress(OSError):
            self._workers[self._next % len(self._workers)][1].send(shard)
        self._next += 1

    def collect(self) -> None:
        """Adds up what was reported since the last time."""
        for _, pipe in self._workers:
            with contextlib.suppress(EOFError, OSError):
                while pipe.poll():
                    _, (_, count, seconds) = pipe.recv()
                    self.signatures += count
                    self.seconds += seconds

    def close(self) -> None:
        self.collect()
        dismiss(self._workers)
