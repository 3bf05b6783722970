"""Times of calls that take turns, so that clocks and heat are shared fairly; medians in milliseconds."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

Run = Callable[[], Any]
_FLUSHED = 256 << 20  # bytes written before each call: nothing of its inputs is left in the cache
_HOST_SECONDS = 6e-4  # what a call may take on the host before it would hold up the device
_CLOCK = 1.8e9


def alternating(runs: Mapping[str, Run], budget: float, rounds: int = 3) -> dict[str, float]:
    """Median milliseconds of each; see `samples`."""
    return {name: statistics.median(found) for name, found in samples(runs, budget, rounds).items()}


def samples(runs: Mapping[str, Run], budget: float, rounds: int = 3) -> dict[str, list[float]]:
    """Milliseconds of each, over ``rounds`` turns of about ``budget`` / rounds milliseconds.

    Each round starts with another of them: what ran before has heated the device, and none should always
    follow the same. On a GPU the device first waits until the host has queued a turn's calls, so that what is
    timed is the device's work alone. Without one: a single call each, by the host's clock.
    """
    if not torch.cuda.is_available():
        return {name: [_once(run)] for name, run in runs.items()}
    flushed = torch.empty(_FLUSHED // 4, dtype=torch.int32, device="cuda")
    counts = {}
    for name, run in runs.items():
        run()
        estimate = _turn(run, 3, flushed)
        counts[name] = max(3, min(40, int(budget / rounds / max(statistics.median(estimate), 1e-3))))
    times: dict[str, list[float]] = {name: [] for name in runs}
    for order in rotations(list(runs), rounds):
        for name in order:
            times[name] += _turn(runs[name], counts[name], flushed)
    return times


def rotations(names: Sequence[str], rounds: int) -> list[list[str]]:
    """The names in turn, each round from the next one on."""
    starts = [i % max(len(names), 1) for i in range(rounds)]
    return [[*names[start:], *names[:start]] for start in starts]


def _turn(run: Run, count: int, flushed: torch.Tensor) -> list[float]:
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2 * count)]  # type: ignore[no-untyped-call]
    pairs = list(zip(events[::2], events[1::2], strict=True))
    torch.cuda._sleep(int(count * _HOST_SECONDS * _CLOCK))  # type: ignore[no-untyped-call]
    for start, stop in pairs:
        flushed.zero_()
        start.record()
        run()
        stop.record()
    torch.cuda.synchronize()
    return [float(start.elapsed_time(stop)) for start, stop in pairs]


def _once(run: Run) -> float:
    start = time.perf_counter()
    run()
    return (time.perf_counter() - start) * 1e3


def host_microseconds(run: Run, count: int = 200) -> float:
    """Wall time a call when one follows the other, for calls whose work on the device is next to nothing."""
    for _ in range(count // 10 + 1):
        run()
    _wait()
    start = time.perf_counter()
    for _ in range(count):
        run()
    _wait()
    return (time.perf_counter() - start) / count * 1e6


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
