"""A worker of a campaign: takes shards from a pipe, hunts, logs every case, stores what it finds.

It holds Hypothesis and no kernel: the kernel lives in the worker's runner. Ends when its pipe closes.
"""

from __future__ import annotations

import os
import signal
import time
import traceback
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from flashcheck.fuzz.confirm import REDUCE_SECONDS, confirmed, with_script
from flashcheck.fuzz.files import Lines
from flashcheck.fuzz.hunter import CaseEvent, Found, hunt
from flashcheck.fuzz.runner import KernelLoadError, Runner
from flashcheck.fuzz.signature import derived
from flashcheck.fuzz.store import Finding, Store
from flashcheck.fuzz.totals import LineWriter


@dataclass(frozen=True, slots=True)
class WorkerTask:
    """What a worker is started with."""

    kernel: str
    device: str
    store: Store
    worker: str
    limit: float
    started: float
    against: str = ""


def work(task: WorkerTask, pipe: Connection) -> None:
    """Sends ("subject", ...), then for each shard ("case", line)..., ("found", id)..., ("done", number).

    ("refused", why) where no kernel loads, ("broken", why) where flashcheck itself failed.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the campaign decides when to stop
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # this process must not touch the GPU
    import torch
    from hypothesis.configuration import set_hypothesis_home_dir

    torch.set_num_threads(1)
    set_hypothesis_home_dir(task.store.folder / "hypothesis")  # not into the user's folder
    log = task.store.folder / "logs" / f"{task.store.run}-{task.worker}.log"
    runner = Runner(task.kernel, task.device, task.limit, log, against=task.against)
    try:
        pipe.send(("subject", runner.subject))
        _serve(task, runner, pipe)
    except KernelLoadError as error:
        pipe.send(("refused", str(error)))
    except (EOFError, ConnectionError):
        pass  # the campaign is gone
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{Path(place.filename).name}:{place.lineno}"
        pipe.send(("broken", f"a worker failed: {type(error).__name__} in {where}: {error}"))
    finally:
        runner.close()


def _serve(task: WorkerTask, runner: Runner, pipe: Connection) -> None:
    lines = Lines(task.store.case_log(task.worker))
    writer = LineWriter()
    while (shard := pipe.recv()) is not None:

        def emit(event: CaseEvent) -> None:
            line = writer.line(event, signature_of(runner, event))
            lines.append(line)  # before it is told: what the campaign counts is on disk
            pipe.send(("case", line))

        until = time.monotonic() + shard.finish
        found = hunt(shard, runner, emit, lambda: _told_to_stop(pipe))
        for place, one in enumerate(found):
            share = (until - time.monotonic()) / (len(found) - place)
            finding = store_finding(task, runner, one, min(REDUCE_SECONDS, max(0.0, share)))
            pipe.send(("found", finding.id))
        pipe.send(("done", shard.number))


def signature_of(runner: Runner, event: CaseEvent) -> str:
    """What was compiled for the case; "" where nothing is compiled."""
    if runner.subject.has_signature:
        return runner.signature(event.case.spec)
    backward = any(name.startswith("backward") for name in event.case.checks)
    return derived(event.case.spec, backward) if runner.device.startswith("cuda") else ""


def _told_to_stop(pipe: Connection) -> bool:
    """A message while a shard runs can only be the one that ends it; so can a closed pipe."""
    return pipe.poll()


def store_finding(task: WorkerTask, runner: Runner, found: Found, seconds: float) -> Finding:
    """Reduces (for so long at most), confirms and stores one new group."""
    first = Finding(
        kernel=task.kernel,
        device=task.device,
        group=found.fits,
        failure=found.failure,
        case=found.case,
        first=found.first,
        cases=found.cases,
        after_cases=found.after_cases,
        after_seconds=round(found.at - task.started, 1),
    )
    task.store.add(first)  # at once: reducing takes seconds, and this process may be killed
    better = confirmed(first, runner, seconds)
    better = with_script(better, runner, task.store.folder / "findings")
    better = task.store.add(replace(better, cases=0))  # its cases are counted already
    _absorb(task.store, runner, better)
    return better


def _absorb(store: Store, runner: Runner, new: Finding) -> None:
    """Earlier findings of which only the look was known are judged again: the new one may explain them."""
    for other in store.findings():
        if other.id != new.id and other.group.looks:
            failure = runner.judge(other.first, candidates=(new.group,)).failure
            if failure is not None and new.group.holds(failure):
                store.absorb(other, failure, new.id)


def start(context: Any, task: WorkerTask) -> tuple[Any, Connection]:
    """The process and this side's end of its pipe."""
    ours, theirs = context.Pipe()
    process = context.Process(target=work, args=(task, theirs))
    process.start()
    theirs.close()
    return process, ours
