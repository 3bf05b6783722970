"""Many machines: shards as Ray tasks, one campaign directory on the machine that started them.

A shard is a pure function of its fields, its result is written whole under its number, and a task that
dies with its node is run again from the start: so nothing is lost, and nothing is counted twice.
"""

from __future__ import annotations

import importlib.util
import json
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from flashcheck.errors import ArgumentError
from flashcheck.files import write_atomically
from flashcheck.fuzz.campaign import PATIENCE, SHARD_SECONDS, Campaign, State
from flashcheck.fuzz.confirm import confirmed
from flashcheck.fuzz.hunter import CaseEvent, Shard, hunt
from flashcheck.fuzz.runner import Runner, Subject
from flashcheck.fuzz.share import one_thread_each
from flashcheck.fuzz.store import Finding, Store
from flashcheck.fuzz.totals import LineWriter
from flashcheck.fuzz.worker import signature_of

RETRIES = 5
"""Of a task whose worker or node died, by Ray; a shard that still fails is handed out again."""


@dataclass(frozen=True, slots=True)
class ShardResult:
    """What a task returns through the object store."""

    number: int
    lines: list[dict[str, Any]]
    findings: list[dict[str, Any]]


def require_ray() -> None:
    """Raises ArgumentError with the line that installs it."""
    if importlib.util.find_spec("ray") is None:
        raise ArgumentError("--ray", "ray is not installed", "pip install 'flashcheck[ray]'")


def run_shard(kernel: str, device: str, limit: float, shard: Shard) -> ShardResult:
    """One shard on whichever machine; the kernel runs in a fresh process, as on one machine."""
    import torch

    torch.set_num_threads(1)
    writer = LineWriter()
    lines: list[dict[str, Any]] = []

    def emit(event: CaseEvent) -> None:
        lines.append(writer.line(event, signature_of(runner, event)))

    with tempfile.TemporaryDirectory() as folder:
        # Ray's processes have threads of their own: forking one would be a gamble.
        runner = Runner(kernel, device, limit, Path(folder) / "log", method="spawn")
        try:
            found = hunt(shard, runner, emit)
            findings = []
            for one in found:
                first = Finding(kernel, device, one.fits, one.failure, one.case, one.first, one.cases)
                findings.append(confirmed(first, runner).to_json())
        finally:
            runner.close()
    return ShardResult(shard.number, lines, findings)


def subject_of(kernel: str, device: str) -> Subject:
    """What the kernel declares, asked on a machine that has the device."""
    with tempfile.TemporaryDirectory() as folder:
        runner = Runner(kernel, device, 60.0, Path(folder) / "log", method="spawn")
        try:
            return runner.subject
        finally:
            runner.close()


class RayCampaign(Campaign):
    """A campaign whose shards run on a Ray cluster; same directory, same view, same end.

    Args: those of Campaign, and
        address: of the cluster; "local" starts one on this machine; "auto" finds a running one.
        shard_cases: problems per task; a task's results arrive together when it ends.
    """

    def __init__(self, *arguments: Any, address: str, shard_cases: int = 50, **more: Any) -> None:
        require_ray()
        super().__init__(*arguments, **more, ahead=0)  # what this machine compiles is of no use elsewhere
        self.address, self.shard_cases = address, shard_cases
        self.resubmitted = 0

    def run(self, on_progress: Callable[[State], None] = lambda _: None) -> State:
        """As ``Campaign.run``; raises ArgumentError where no cluster answers."""
        import ray

        one_thread_each()
        if not ray.is_initialized():
            self._connect()
        gpus = 1 if self.device.startswith("cuda") else 0
        options = {"num_gpus": gpus, "num_cpus": 1, "max_retries": RETRIES, "retry_exceptions": False}
        work = ray.remote(run_shard).options(**options)
        subject = ray.get(ray.remote(subject_of).options(**options).remote(self.kernel, self.device))
        self._plan(subject)
        running: dict[Any, Shard] = {}
        try:
            while not self._over():
                cluster = cast(Any, ray).cluster_resources()  # ray ships no types for it
                slots = max(1, int(cluster.get("GPU" if gpus else "CPU", 1)))
                asked = sum(shard.cases for shard in running.values())
                left = None if self.budget.cases is None else self.budget.cases - self.state.cases - asked
                while len(running) < slots and (left is None or left > 0):
                    shard = self._next(left)
                    running[self._submit(work, shard)] = shard
                    left = None if left is None else left - shard.cases
                self._collect(work, running, on_progress)
            until = time.monotonic() + SHARD_SECONDS + PATIENCE
            while running and time.monotonic() < until:  # what was handed out counts: nothing is lost
                self._collect(work, running, on_progress)
        except KeyboardInterrupt:
            self.state.interrupted, self.state.stopped = True, "Ctrl-C was pressed"
        for reference in running:
            ray.cancel(reference, force=True)
        self.state.findings = self.store.findings()
        return self.state

    def _connect(self) -> None:
        import ray

        here = str(Path.cwd())
        path = os.pathsep.join([here, *([p] if (p := os.environ.get("PYTHONPATH")) else [])])
        kept = {n: os.environ[n] for n in ("TRITON_INTERPRET", "OMP_NUM_THREADS") if n in os.environ}
        environment = {"env_vars": {"PYTHONPATH": path, **kept}}
        address = None if self.address == "local" else self.address
        try:
            ray.init(address=address, runtime_env=environment, log_to_driver=False, include_dashboard=False)
        except (ConnectionError, ValueError) as error:
            raise ArgumentError(
                "--ray", self.address, f"the address of a running cluster ({error})"
            ) from None

    def _next(self, left: int | None) -> Shard:
        return self._shard(self.shard_cases if left is None else min(left, self.shard_cases))

    def _submit(self, work: Any, shard: Shard) -> Any:
        return work.remote(self.kernel, self.device, self.limit, shard)

    def _collect(self, work: Any, running: dict[Any, Shard], on_progress: Callable[[State], None]) -> None:
        import ray

        done, _ = ray.wait(list(running), timeout=0.25)
        for reference in done:
            shard = running.pop(reference)
            try:
                result: ShardResult = ray.get(reference)
            except ray.exceptions.RayTaskError:
                raise  # our own fault, not the node's
            except ray.exceptions.RayError:
                self.resubmitted += 1
                running[self._submit(work, shard)] = shard
                continue
            self._take(result)
        on_progress(self.state)

    def _take(self, result: ShardResult) -> None:
        for data in result.findings:
            self.store.add(Finding.from_json(data))
        if write_shard(self.store, result):
            for line in result.lines:
                self.state.cases += 1
                self.state.totals.add(line)
                if self._scheduler is not None:
                    self._scheduler.saw(line)
        self.state.findings = self.store.findings()


def write_shard(store: Store, result: ShardResult) -> bool:
    """Writes a shard's case lines under its number; False where they are there already."""
    path = store.folder / "cases" / f"shard-{result.number:06d}.jsonl"
    if path.exists():
        return False
    write_atomically(path, "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in result.lines))
    return True
