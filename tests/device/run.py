"""Runs jobs side by side until they are done or the time is up; whatever is finished is in the archive.

Every job is a process group of its own, with a log and a file for what it found, under one folder. At its
limit, and at the end of the run, a job is interrupted as Ctrl-C would, and killed if it does not end then.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import subprocess
import tarfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.device.jobs import Job

GRACE = 12.0
"""Seconds between the interrupt and the kill."""
PIECE = 15 * 2**20
"""Bytes of the largest file of an archive; more are cut into pieces, to be joined with ``cat``."""
_POLL = 0.2
_ARCHIVE_EVERY = 45.0


@dataclass(slots=True)
class Outcome:
    """What became of a job: ``ended`` is "done", "interrupted", "killed" or "not started"."""

    job: Job
    ended: str = "not started"
    code: int | None = None
    seconds: float = 0.0
    verdict: str = ""

    def to_json(self) -> dict[str, Any]:
        return {
            "ended": self.ended,
            "code": self.code,
            "seconds": round(self.seconds, 1),
            "verdict": self.verdict,
            "arguments": list(self.job.arguments),
        }


@dataclass(slots=True)
class _Running:
    job: Job
    process: subprocess.Popen[bytes]
    started: float
    interrupted: float | None = None


@dataclass
class Runner:
    """One run.

    Attributes:
        jobs: in order of their importance.
        folder: for logs and files. archive: where everything is packed to, now and then and at the end.
        cache: for what compilers keep, shared by the jobs.
        slots: how many cores jobs keep busy together. seconds: when the run ends, GRACE included.
        limit: takes the place of every longer limit.
        verdict: what a finished job found, in a few words.
    """

    jobs: Sequence[Job]
    folder: Path
    archive: Path | None
    cache: Path
    slots: int
    seconds: float
    limit: float | None = None
    verdict: Callable[[Job, Path], str] = lambda _job, _folder: ""
    say: Callable[[str], None] = print
    outcomes: dict[str, Outcome] = field(default_factory=dict)

    def go(self) -> dict[str, Outcome]:
        """Runs; Ctrl-C ends the run as its limit does."""
        self.outcomes = {job.name: Outcome(job) for job in self.jobs}
        waiting, running = list(self.jobs), list[_Running]()
        started = packed = time.monotonic()
        end = started + self.seconds - GRACE
        while waiting or running:
            try:
                now = time.monotonic()
                if now < end:
                    self._start_more(waiting, running)
                for one in list(running):
                    if self._ended(one, min(end, one.started + self._limit(one.job)), now):
                        running.remove(one)
                        self._note(one.job)
                if now >= end and not running:
                    break
                if now - packed > _ARCHIVE_EVERY:
                    packed = now
                    self.pack()
                time.sleep(_POLL)
            except KeyboardInterrupt:
                end = time.monotonic()
        self._write_summary()
        self.pack()
        return self.outcomes

    def _limit(self, job: Job) -> float:
        return job.limit if self.limit is None else min(job.limit, self.limit)

    def _start_more(self, waiting: list[Job], running: list[_Running]) -> None:
        """The next jobs, as long as slots are free. A job that waits for another one is overtaken; one that
        waits for more slots is not, or it would wait for ever."""
        blocked = False
        for job in list(waiting):
            open_names = {other.name for other in waiting} | {one.job.name for one in running}
            if open_names.intersection(job.after) or (job.endless and blocked):
                blocked = True
                continue
            free = self.slots - sum(one.job.slots for one in running)
            if job.slots > free and running:  # one that wants more than there are runs alone
                return
            waiting.remove(job)
            running.append(self._start(job))

    def _start(self, job: Job) -> _Running:
        path = self.folder / job.name
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(f"{path}.log", "wb") as log:
            process = subprocess.Popen(
                job.command(self.folder),
                env=self._environment(job),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=_listen,
            )
        return _Running(job, process, time.monotonic())

    def _environment(self, job: Job) -> dict[str, str]:
        more = {
            "OMP_NUM_THREADS": "1",
            "MKL_NUM_THREADS": "1",
            "PYTHONUNBUFFERED": "1",
            "COLUMNS": "160",
            "TRITON_CACHE_DIR": str(self.cache / "triton"),
            "TORCHINDUCTOR_CACHE_DIR": str(self.cache / "inductor"),
            "TORCHINDUCTOR_COMPILE_THREADS": "1",
            "JAX_PLATFORMS": "cpu",
            "JAX_COMPILATION_CACHE_DIR": str(self.cache / "jax"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED": "1",
            "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR": str(self.cache / "flash_attn"),
        }
        if job.on_cpu:
            more["CUDA_VISIBLE_DEVICES"] = ""
        return {**os.environ, **more, **job.environment}

    def _ended(self, one: _Running, until: float, now: float) -> bool:
        """True once the process is gone; interrupts and kills it where its time is up."""
        code = one.process.poll()
        outcome = self.outcomes[one.job.name]
        if code is None and one.interrupted is None and now >= until:
            one.interrupted = now
            _signal(one.process, signal.SIGINT)
        if code is None and one.interrupted is not None and now > one.interrupted + GRACE:
            _signal(one.process, signal.SIGKILL)
            code = one.process.wait()
            outcome.ended = "killed"
        if code is None:
            return False
        _signal(one.process, signal.SIGKILL)  # what it left behind
        if outcome.ended != "killed":
            outcome.ended = "done" if one.interrupted is None else "interrupted"
        outcome.code, outcome.seconds = code, time.monotonic() - one.started
        return True

    def _note(self, job: Job) -> None:
        outcome = self.outcomes[job.name]
        try:
            outcome.verdict = self.verdict(job, self.folder)
        except Exception as error:  # a file that is cut short is no reason to lose the others
            outcome.verdict = f"{type(error).__name__}: {error}"[:100]
        self.say(self.line(outcome))
        self._write_summary()

    def line(self, outcome: Outcome) -> str:
        """One job as a line of the table."""
        code = "-" if outcome.code is None else str(outcome.code)
        cells = f"{outcome.job.name:<48} {outcome.ended:<12} {code:>4} {outcome.seconds:7.1f} s"
        return f"{cells}  {outcome.verdict}".rstrip()

    def _write_summary(self) -> None:
        data = {name: outcome.to_json() for name, outcome in self.outcomes.items()}
        path = self.folder / "summary.json"
        path.with_suffix(".new").write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
        path.with_suffix(".new").replace(path)

    def pack(self) -> None:
        """Writes the folder as ``archive``, whole: a reader never sees half of one."""
        if self.archive is None:
            return
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
            for path in sorted(self.folder.rglob("*")):
                if path.is_file():
                    with contextlib.suppress(OSError):  # a file that a job has just replaced
                        tar.add(path, arcname=str(path.relative_to(self.folder)))
        data = buffer.getvalue()
        pieces = [data[at : at + PIECE] for at in range(0, len(data), PIECE)]
        self.archive.parent.mkdir(parents=True, exist_ok=True)
        for number, piece in enumerate(pieces):
            target = self.archive if len(pieces) == 1 else Path(f"{self.archive}.{number:02}")
            new = target.with_name(target.name + ".new")
            new.write_bytes(piece)
            new.replace(target)
        if len(pieces) > 1:
            self.archive.unlink(missing_ok=True)


def _listen() -> None:
    """A process started from a script's background ignores Ctrl-C, and so would what it starts."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _signal(process: subprocess.Popen[bytes], which: signal.Signals) -> None:
    """To the process and all that it started."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, which)
