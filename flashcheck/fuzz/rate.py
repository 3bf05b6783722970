"""Judged cases per second once everything is compiled: what cores, and the GPU that they share, can do.

Where a kernel is compiled, its campaign keeps to a few signatures, for which it is called beforehand; what
that takes is told apart, and so is what the campaign compiled all the same.
"""

from __future__ import annotations

import random
import tempfile
import time
from pathlib import Path
from typing import Any

from flashcheck.fuzz.ahead import Ahead
from flashcheck.fuzz.campaign import Budget, Campaign, State, process_context
from flashcheck.fuzz.hunter import Passes
from flashcheck.fuzz.runner import DEFAULT_LIMIT, Runner
from flashcheck.fuzz.share import one_thread_each
from flashcheck.fuzz.signature import Foci, Focus
from flashcheck.fuzz.store import Store
from flashcheck.fuzz.worker import WorkerTask

SETTLING = 3.0
"""Seconds after the last worker has begun."""

_POLL = 0.2
_PATIENCE = 300.0
"""Seconds for which signatures are compiled, and workers waited for."""


def rate(
    kernel: str,
    device: str,
    *,
    workers: int,
    seconds: float,
    seed: int = 1,
    passes: Passes = "both",
    largest: int = 129,
    signatures: int = 0,
) -> dict[str, Any]:
    """One campaign, counted for ``seconds`` from when all workers are at work.

    Args:
        passes, largest: as of a Shard.
        signatures: that it keeps to; 0: it draws all that is declared, for kernels that nobody compiles.
    """
    one_thread_each()
    with tempfile.TemporaryDirectory(prefix="flashcheck-rate-") as folder:
        store = Store(Path(folder) / "campaign")
        store.open(kernel, seed, resume=False)
        arms, compiled = _compiled(kernel, device, store, workers, seed, passes, signatures)
        window = _Window(store, workers, seconds)
        where = (kernel, device, store, seed, Budget())
        options: dict[str, Any] = {"passes": passes, "largest": largest, "arms": arms}
        state = Campaign(*where, workers=workers, ahead=0, **options).run(window)
    return {
        "kernel": kernel,
        "passes": passes,
        "largest": largest,
        "workers": workers,
        "seed": seed,
        **window.result(),
        "before": compiled,
        "judge_faults": dict(state.totals.faults),
        "findings": [f.to_json() for f in state.findings],
    }


def _compiled(
    kernel: str, device: str, store: Store, workers: int, seed: int, passes: Passes, count: int
) -> tuple[tuple[Focus, ...], dict[str, Any]]:
    """Foci, compiled by as many processes as there will be workers; and what that took."""
    runner = Runner(kernel, device, DEFAULT_LIMIT, store.folder / "logs" / "declared.log", method="spawn")
    capabilities = runner.subject.capabilities
    runner.close()
    if not count:
        return tuple(Focus(dtype) for dtype in capabilities.dtypes), {}
    foci = Foci(random.Random(seed), capabilities, capabilities.dtypes)
    arms: list[Focus] = []
    while len(arms) < count:
        focus = foci.next()
        if focus.like is not None and min(focus.like.num_queries, focus.like.num_keys) > 1:
            arms.append(focus)
    task = WorkerTask(kernel, device, store, "before", DEFAULT_LIMIT, time.time())
    started = time.monotonic()
    helpers = Ahead(process_context(), task, min(workers, count), passes)
    for focus in arms:
        helpers.give(focus, seed)
    done = 0
    while helpers and done < count and time.monotonic() - started < _PATIENCE:
        done += len(helpers.collect())
        time.sleep(_POLL)
    helpers.close()
    took = {"wall_seconds": round(time.monotonic() - started, 1), "seconds": round(helpers.seconds, 1)}
    return tuple(arms), {"foci": done, "signatures": helpers.signatures, **took}


class _Window:
    """Counts from when every worker has begun and has settled; then ends the campaign."""

    def __init__(self, store: Store, workers: int, seconds: float) -> None:
        self.store, self.workers, self.seconds = store, workers, seconds
        self.begun = self.since = self.until = 0.0
        self.at_first: tuple[int, dict[str, float]] = (0, {})
        self.at_last: tuple[int, dict[str, float]] = (0, {})
        self.created = time.monotonic()

    def __call__(self, state: State) -> None:
        now = time.monotonic()
        if state.stopped:
            return
        if not self.begun:
            at_work = len(list((self.store.folder / "cases").glob("*.jsonl")))
            self.begun = now if at_work >= self.workers and state.cases else 0.0
            if not self.begun and now - self.created > _PATIENCE:
                state.stopped = "not all workers began"
        elif not self.since and now - self.begun > SETTLING:
            self.since, self.at_first = now, (state.cases, dict(state.totals.seconds))
        elif self.since:
            self.until, self.at_last = now, (state.cases, dict(state.totals.seconds))
            if now - self.since >= self.seconds:
                state.stopped = "it was measured"

    def result(self) -> dict[str, Any]:
        """Cases, seconds, their ratio, where the time of all workers went; and the ratio without the seconds
        in which something was compiled."""
        cases, wall = self.at_last[0] - self.at_first[0], self.until - self.since
        spent = {part: s - self.at_first[1].get(part, 0.0) for part, s in self.at_last[1].items()}
        whole = self.workers * wall
        spent["hunter and pipes"] = max(0.0, whole - sum(spent.values()))
        without = wall - spent.get("compile", 0.0) / self.workers
        return {
            "cases": cases,
            "seconds": round(wall, 1),
            "cases_per_second": round(cases / wall, 2) if wall else 0.0,
            "cases_per_second_without_compiling": round(cases / without, 2) if without > 0 else 0.0,
            "milliseconds_a_case": {p: round(1e3 * s / max(1, cases), 2) for p, s in spent.items()},
            "share": {p: round(s / whole, 3) for p, s in spent.items()} if whole else {},
        }


def told(row: dict[str, Any]) -> str:
    """One row of measurements as a line."""
    parts = ", ".join(f"{part} {100 * share:.0f}%" for part, share in row["share"].items() if share >= 0.005)
    before = row["before"]
    ahead = f"; before: {before['signatures']} signatures in {before['wall_seconds']:g} s" if before else ""
    return (
        f"{row['kernel']} {row['passes']}, {row['workers']} workers: {row['cases_per_second']:g} cases/s, "
        f"{row['cases_per_second_without_compiling']:g} once compiled ({parts}){ahead}"
    )
