"""Judges a kernel in one dtype once per run: the first test that needs it does, in whatever worker.

The result is a certificate in the folder that the workers share; a lock per group makes the others wait.
"""

from __future__ import annotations

import datetime
import hashlib
import importlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from flashcheck.certify import certify
from flashcheck.commands.durations import seconds
from flashcheck.devices import choose_device
from flashcheck.errors import UnknownNameError
from flashcheck.kernel import Kernel, as_kernel
from flashcheck.loading import load
from flashcheck.plan import DEFAULT_SEED, LEVELS, make_plan
from flashcheck.pytest_plugin.session import Session
from flashcheck.report.build import certificate_of
from flashcheck.report.certificate import Certificate, read, write
from flashcheck.report.merge import of_one_dtype
from flashcheck.settings import read_settings


@dataclass(frozen=True, slots=True, eq=False)
class Subject:
    """A kernel as the user gave it, and loaded.

    Attributes:
        name: in test ids. load_name: by which the command line finds it; empty: it does not.
        identity: tells it from every other kernel, in every worker of the run: two objects may share a name.
    """

    name: str
    identity: str
    load_name: str
    given: Any
    kernel: Kernel


def subject_from(thing: Any, place: str) -> Subject:
    """From a name, a ``Kernel`` or a callable; raises ArgumentError for anything else.

    ``place`` is the identity of an object that no name finds: where in the tests it stands.
    """
    if isinstance(thing, str):
        return Subject(thing, thing, thing, thing, load(thing))
    module, name = getattr(thing, "__module__", None), getattr(thing, "__qualname__", None)
    full = f"{module}:{name}" if module and name and not isinstance(thing, Kernel) else ""
    kernel = as_kernel(thing, full or getattr(thing, "__name__", type(thing).__name__))
    load_name = full if _is_found(thing, module, name) else ""
    return Subject(full or kernel.name, load_name or place, load_name, thing, kernel)


def _is_found(thing: Any, module: str | None, name: str | None) -> bool:
    if not module or not name:
        return False
    try:
        return getattr(importlib.import_module(module), name, None) is thing
    except ImportError:
        return False


@dataclass(frozen=True, slots=True)
class Group:
    """What one run of the judge answers: a kernel, a dtype and the extent of the plan."""

    subject: Subject
    dtype: str
    level: str
    device: str
    seed: int
    max_cases: int | None
    max_time: str | None

    @staticmethod
    def from_options(session: Session, subject: Subject, dtype: str, **narrowing: Any) -> Group:
        """With the run's options; ``narrowing`` (level, device, seed, max_cases, max_time) goes before.

        Raises UnknownNameError for an unknown level or keyword.
        """
        known = ("level", "device", "seed", "max_cases", "max_time")
        for name in narrowing:
            if name not in known:
                raise UnknownNameError("certify argument", name, known)
        options = session.options
        level = options.level or read_settings(session.root).level
        if level not in LEVELS:
            raise UnknownNameError("--flashcheck-level", level, LEVELS)
        seed = DEFAULT_SEED if options.seed is None else options.seed
        device = _device(session, subject.kernel)
        group = Group(subject, dtype, level, device, seed, options.max_cases, options.max_time)
        return replace(group, **narrowing)

    @property
    def key(self) -> str:
        """The name of its file."""
        parts = (self.subject.identity, self.dtype, self.level, self.seed, self.max_cases, self.max_time)
        return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]

    @property
    def command(self) -> str:
        """What does the same on the command line."""
        words = ["flashcheck certify", self.subject.load_name or self.subject.name, "--dtype", self.dtype]
        words += ["--level", self.level]
        words += [] if self.seed == DEFAULT_SEED else ["--seed", str(self.seed)]
        words += [] if self.max_cases is None else ["--max-cases", str(self.max_cases)]
        words += [] if self.max_time is None else ["--max-time", self.max_time]
        return " ".join(words)


def _device(session: Session, kernel: Kernel) -> str:
    """The one asked for; where there are several GPUs, each worker has its own."""
    device = choose_device(session.options.device, kernel)
    if device == "cuda" and session.is_worker:
        import torch

        return f"cuda:{session.worker_number % torch.cuda.device_count()}"
    return device


_known: dict[Path, Certificate] = {}


def judged(session: Session, group: Group) -> Certificate:
    """The group's certificate, of one dtype; made by the first who asks."""
    from filelock import FileLock

    path = session.folder / f"{group.key}.json"
    if path in _known:
        return _known[path]
    session.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    with FileLock(path.with_suffix(".lock")):
        if not path.exists():
            write(_judge(group), path)
    _known[path] = read(path)
    return _known[path]


def _judge(group: Group) -> Certificate:
    kernel = group.subject.kernel
    plan = make_plan(kernel, group.level, (group.dtype,), group.max_cases, group.seed)
    limit = None if group.max_time is None else seconds(group.max_time)
    started = datetime.datetime.now(datetime.UTC)
    outcome = certify(kernel, plan, device=group.device, max_seconds=limit)
    if outcome.interrupted:
        raise KeyboardInterrupt
    load_name = group.subject.load_name
    whole = certificate_of(kernel, outcome, group.device, group.command, started, load_name)
    return of_one_dtype(whole, group.dtype)
