"""Judges the dtypes of a plan side by side, one process each; outcomes are keyed by dtype, so they add up.

A worker loads the kernel by name: a kernel object need not be picklable. Ctrl-C ends all of them, also where
it reaches only this process, or comes before a worker has begun; each returns what it has judged so far.
"""

from __future__ import annotations

import multiprocessing
import os
import queue
import time
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import replace
from typing import Any

from flashcheck.certify import Outcome, Progress, certify
from flashcheck.kernel import Kernel
from flashcheck.loading import load
from flashcheck.plan import Plan

FEWEST_CASES = 40
"""A process costs seconds to start: shorter plans run in one."""

_channel: Any = None
_stop: Any = None


def certify_by_name(
    name: str,
    kernel: Kernel,
    plan: Plan,
    *,
    device: str = "cpu",
    max_seconds: float | None = None,
    on_progress: Callable[[Progress], None] = lambda _: None,
    workers: int | None = None,
) -> Outcome:
    """``certify``, with up to ``workers`` processes (None: one per core) where that pays: on a GPU too, since
    the judge's own work is done on the CPU wherever the kernel runs."""
    workers = (os.cpu_count() or 1) if workers is None else workers
    alone = workers < 2 or len(plan.dtypes) < 2 or len(plan.cases) < FEWEST_CASES
    if alone:
        return certify(kernel, plan, device=device, max_seconds=max_seconds, on_progress=on_progress)
    started = time.perf_counter()
    parts = [_part(plan, dtype) for dtype in plan.dtypes]
    context = multiprocessing.get_context("spawn")
    channel, stop = context.Queue(), context.Event()
    with ProcessPoolExecutor(min(workers, len(parts)), context, _connect, (channel, stop)) as pool:
        futures = [pool.submit(_run, name, part, device, max_seconds) for part in parts]
        interrupted = _relay(futures, channel, stop, len(plan.cases), on_progress)
        outcome = _merged(plan, [future.result() for future in futures])
    outcome.interrupted |= interrupted
    outcome.seconds = time.perf_counter() - started
    return outcome


def _part(plan: Plan, dtype: str) -> Plan:
    cases = tuple(case for case in plan.cases if case.spec.dtype == dtype)
    return replace(plan, dtypes=(dtype,), cases=cases)


def _connect(channel: Any, stop: Any) -> None:
    global _channel, _stop
    _channel, _stop = channel, stop


def _run(name: str, part: Plan, device: str, max_seconds: float | None) -> Outcome:
    if _stop.is_set():
        why = "interrupted before the first problem"
        missing: dict[str, tuple[str, ...]] = {dtype: ("the whole dtype",) for dtype in part.dtypes}
        return Outcome(part, missing=missing, stopped=why, interrupted=True)
    return certify(load(name), part, device=device, max_seconds=max_seconds, on_progress=_report)


def _report(event: Progress) -> None:
    _channel.put(event)
    if _stop.is_set():
        raise KeyboardInterrupt


def _relay(
    futures: list[Future[Outcome]],
    channel: Any,
    stop: Any,
    total: int,
    on_progress: Callable[[Progress], None],
) -> bool:
    """Passes the workers' events on until all are done; True where the user interrupted."""
    done: dict[str, Progress] = {}
    interrupted = False
    while not all(future.done() for future in futures):
        try:
            event: Progress = channel.get(timeout=0.2)
            done[event.case.spec.dtype] = event
            counted = sum(e.done for e in done.values())
            on_progress(Progress(counted, total, event.case, sum(e.failures for e in done.values())))
        except queue.Empty:
            continue
        except KeyboardInterrupt:
            stop.set()
            interrupted = True
    return interrupted


def _merged(plan: Plan, parts: list[Outcome]) -> Outcome:
    whole = Outcome(plan)
    for part in parts:
        whole.tensors.update(part.tensors)
        whole.checks.update(part.checks)
        whole.slack.update(part.slack)
        whole.rungs.update(part.rungs)
        whole.durations.update(part.durations)
        whole.findings += part.findings
        whole.tilings.update(part.tilings)
        whole.judge_faults += [fault for fault in part.judge_faults if fault not in whole.judge_faults]
        whole.judged += part.judged
        whole.stopped = whole.stopped or part.stopped
        whole.interrupted |= part.interrupted
    # Each worker saw one dtype; what of the declaration is missing, only the whole can say.
    judged = {dtype: part.missing.get(dtype) for dtype, part in zip(plan.dtypes, parts, strict=True)}
    absent = {d: m for d, m in parts[0].missing.items() if d not in plan.dtypes}
    for part in parts:
        whole.combinations.update(part.combinations)
    whole.missing = {dtype: missing for dtype, missing in judged.items() if missing} | absent
    return whole
