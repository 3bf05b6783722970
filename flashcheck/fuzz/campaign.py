"""Runs a campaign: starts workers, hands out shards, restarts what dies, ends on budget or Ctrl-C."""

from __future__ import annotations

import contextlib
import hashlib
import math
import multiprocessing
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection, wait
from typing import Any

from flashcheck.errors import ArgumentError
from flashcheck.fuzz.ahead import Ahead
from flashcheck.fuzz.hunter import SHRINK_SECONDS, Passes, Shard
from flashcheck.fuzz.runner import DEFAULT_LIMIT, Subject
from flashcheck.fuzz.schedule import Scheduler
from flashcheck.fuzz.share import default_helpers, gpus, one_thread_each
from flashcheck.fuzz.signature import Focus
from flashcheck.fuzz.store import Finding, Store
from flashcheck.fuzz.totals import Totals, totals_of
from flashcheck.fuzz.worker import WorkerTask, start

SHARD_CASES = 200
FIRST_CASES = 24
"""Of the shards that are handed out while nobody knows whether compiling is dear."""

SHARD_SECONDS = 60.0
"""A shard ends after either: bugs that another worker has found meanwhile are known from the next one on."""

_REFRESH = 0.25
OVERTIME = 0.15
"""Share of the budget's seconds for which findings may be reduced past it; their repros come on top."""

PATIENCE = 2 * SHRINK_SECONDS + 30.0
"""Seconds after the end for which workers may shrink, reduce and write what they have just found."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """When a campaign ends: after so many seconds, or cases of this run. inf and None: on Ctrl-C."""

    seconds: float = math.inf
    cases: int | None = None


@dataclass(slots=True)
class State:
    """What a view shows; ``totals`` and ``findings`` include earlier runs of the campaign.

    ``ahead``: problems for which the kernel was compiled ahead, and the seconds that took, in parallel.
    """

    kernel: str
    seed: int
    workers: int
    totals: Totals
    findings: list[Finding]
    started: float = field(default_factory=time.monotonic)
    cases: int = 0
    owed: dict[str, set[str]] = field(default_factory=dict)
    restarts: int = 0
    ahead: tuple[int, float] = (0, 0.0)
    stopped: str = ""
    interrupted: bool = False

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.started


@dataclass(slots=True)
class _Worker:
    process: Any
    pipe: Connection
    subject: Subject | None = None
    stopping: bool = False


class Campaign:
    """One run of a campaign.

    Args:
        kernel: its name as typed; workers load it by that name.
        device: where it runs; ``cuda`` deals the workers out to the GPUs there are, in turn.
        store: the campaign's directory, opened.
        dtypes: narrows the declared ones.
        limit: seconds for one case.
        against: name of a second kernel to compare with, or "".
        ahead: processes that compile for shards to come; None: some on a GPU, none elsewhere.
        passes, largest: as of a Shard; arms: the foci of all shards, where not the scheduler chooses them.
    """

    def __init__(
        self,
        kernel: str,
        device: str,
        store: Store,
        seed: int,
        budget: Budget,
        *,
        workers: int = 1,
        dtypes: tuple[str, ...] = (),
        limit: float = DEFAULT_LIMIT,
        against: str = "",
        ahead: int | None = None,
        passes: Passes = "both",
        largest: int = 129,
        arms: tuple[Focus, ...] = (),
    ) -> None:
        self.kernel, self.device, self.store, self.budget = kernel, device, store, budget
        self.dtypes, self.limit, self.against = dtypes, limit, against
        self.state = State(kernel, seed, workers, totals_of(store.case_lines()), store.findings())
        self.passes, self.largest, self.arms = passes, largest, arms
        self.ahead = default_helpers(device) if ahead is None else ahead
        self._ahead: Ahead | None = None
        self._workers: list[_Worker] = []
        self._scheduler: Scheduler | None = None
        self._again = store.unfinished()
        self._proposed: set[Focus] = set()
        self._shown: set[Focus] = set()
        self._started = time.time()
        self._context = process_context()

    def run(self, on_progress: Callable[[State], None] = lambda _: None) -> State:
        """Hunts until the budget ends or the user interrupts; raises ArgumentError where no kernel loads."""
        one_thread_each()
        try:
            for number in range(self.state.workers):
                self._workers.append(self._start(number))
            while not self._over():
                self._turn(on_progress)
        except KeyboardInterrupt:
            self.state.interrupted, self.state.stopped = True, "Ctrl-C was pressed"
        finally:
            with contextlib.suppress(KeyboardInterrupt):  # a second Ctrl-C does not wait for shrinking
                self._finish(on_progress)
            self._close()
        return self.state

    def _start(self, number: int) -> _Worker:
        device = self.device
        if device == "cuda" and self.state.workers > 1:
            device = f"cuda:{number % max(1, gpus())}"
        name = f"{number}-{self.state.restarts}"
        task = WorkerTask(self.kernel, device, self.store, name, self.limit, self._started, self.against)
        return _Worker(*start(self._context, task))

    def _over(self) -> bool:
        if self.state.stopped or self._scheduler is None:
            return bool(self.state.stopped)
        if self.state.seconds >= self.budget.seconds:
            self.state.stopped = "time is up"
        elif self.budget.cases is not None and self.state.cases >= self.budget.cases:
            self.state.stopped = "all cases were judged"
        return bool(self.state.stopped)

    def _turn(self, on_progress: Callable[[State], None]) -> None:
        pipes = [w.pipe for w in self._workers]
        for pipe in wait(pipes, timeout=_REFRESH):
            worker = next(w for w in self._workers if w.pipe is pipe)
            self._receive(worker)
        self._compile_ahead()
        on_progress(self.state)

    def _compile_ahead(self) -> None:
        """Opens the arms that helpers have compiled, and gives them those that are due."""
        if self._ahead is None or self._scheduler is None:
            return
        for one in self._ahead.collect():
            for signature, seconds in one.seconds.items():
                self._scheduler.first_call(signature, seconds)
            if one.focus in self._proposed:
                self._proposed.discard(one.focus)
                self._shown.add(one.focus)
                self._scheduler.open(one.focus)
        self.state.ahead = self._ahead.signatures, self._ahead.seconds
        while self._ahead.idle and not self.state.stopped and self._scheduler.due(helpers=True):
            focus = self._scheduler.propose()
            self._proposed.add(focus)
            self._ahead.give(focus, self.state.seed)

    def _receive(self, worker: _Worker) -> None:
        try:
            what, content = worker.pipe.recv()
        except (EOFError, ConnectionError):
            if worker.stopping:
                self._workers.remove(worker)
                return
            self.state.restarts += 1  # a worker holds no kernel: somebody ended it
            self._workers[self._workers.index(worker)] = self._start(self._workers.index(worker))
            return
        if what == "refused":
            raise ArgumentError("KERNEL", self.kernel, f"a kernel that can be loaded ({content})")
        if what == "broken":
            self.state.totals.faults[content] += 1
            self.state.stopped = "the judge failed"
            self._workers.remove(worker)
        elif what == "subject":
            worker.subject = content
            self._plan(content)
        elif what == "case":
            self.state.cases += 1
            self.state.totals.add(content)
            if self._scheduler is not None:
                self._scheduler.saw(content)
        elif what == "found":
            self.state.findings = self.store.findings()
        if what in ("subject", "done") and not worker.stopping:
            self._give(worker)

    def _plan(self, subject: Subject) -> None:
        if self._scheduler is not None:
            return
        self.state.started = time.monotonic()  # the budget is for hunting, not for importing torch
        for dtype in self.dtypes:
            if dtype not in subject.capabilities.dtypes:
                raise ArgumentError("--dtype", dtype, f"one of {', '.join(subject.capabilities.dtypes)}")
        compiled = True if subject.has_signature else None if self.device.startswith("cuda") else False
        self._scheduler = Scheduler(
            self.dtypes or subject.capabilities.dtypes,
            subject.capabilities,
            compiled=compiled,
            seed=self.state.seed,
            workers=self.state.workers,
            arms=self.arms,
        )
        if compiled is not False and self.ahead:
            task = WorkerTask(self.kernel, self.device, self.store, "ahead", self.limit, self._started)
            self._ahead = Ahead(self._context, task, self.ahead, self.passes)
        from flashcheck.inputs.coverage import required

        owed = set(required(subject.capabilities))
        self.state.owed = {dtype: owed for dtype in self._scheduler.dtypes}

    def _give(self, worker: _Worker) -> None:
        assert self._scheduler is not None
        left = SHARD_CASES if self.budget.cases is None else self.budget.cases - self.state.cases
        if left <= 0 or self.state.seconds >= self.budget.seconds:
            return
        # Small budgets are for every dtype too.
        turns = self.state.workers * len(self._scheduler.dtypes)
        share = SHARD_CASES if self.budget.cases is None else math.ceil(self.budget.cases / turns)
        most = SHARD_CASES if self._scheduler.settled else FIRST_CASES
        worker.pipe.send(self._timed(self._shard(min(most, share, left))))

    def _shard(self, cases: int) -> Shard:
        """A new one, claimed; of what promises most."""
        assert self._scheduler is not None
        number = self.store.claim_shard()
        focus = self._scheduler.choose(number, helpers=bool(self._ahead))
        if self._ahead and focus.like is not None and focus not in self._shown:
            # Helpers take part in compiling an arm that was opened without them.
            self._ahead.give(focus, self.state.seed)
        self._shown.add(focus)
        shard = Shard(
            number=number,
            seed=_seed(self.state.seed, number),
            focus=focus,
            cases=cases,
            passes=self.passes,
            largest=self.largest,
            known=self.store.known(),
            again=tuple(self._again),
        )
        self._again = []
        return self._timed(shard)

    def _timed(self, shard: Shard) -> Shard:
        """With the time that is left now."""
        left = max(0.0, self.budget.seconds - self.state.seconds)
        finish = left + OVERTIME * self.budget.seconds
        return replace(shard, seconds=min(SHARD_SECONDS, left), finish=finish)

    def _finish(self, on_progress: Callable[[State], None]) -> None:
        """Lets workers end their case, and shrink what they have just found."""
        for worker in self._workers:
            worker.stopping = True
            with contextlib.suppress(OSError):
                worker.pipe.send(None)
        until = time.monotonic() + (PATIENCE if not self.state.interrupted else SHRINK_SECONDS)
        while self._workers and time.monotonic() < until:
            self._turn(on_progress)

    def _close(self) -> None:
        if self._ahead is not None:
            self._ahead.close()
            self.state.ahead = self._ahead.signatures, self._ahead.seconds
        for worker in self._workers:
            worker.pipe.close()
            worker.process.join(1.0)
            if worker.process.is_alive():
                worker.process.kill()
        self.state.findings = self.store.findings()


def process_context() -> Any:
    """What starts workers and helpers: one process imports torch for all of them, where that is possible."""
    methods = multiprocessing.get_all_start_methods()
    context: Any = multiprocessing.get_context("forkserver" if "forkserver" in methods else "spawn")
    if "forkserver" in methods:
        context.set_forkserver_preload(["flashcheck.fuzz.worker"])
    return context


def _seed(seed: int, shard: int) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed}/{shard}".encode()).digest()[:8], "big")
