"""Runs a fuzz campaign: opens its directory, shows it, sums it up."""

from __future__ import annotations

import math
import re
import secrets
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.text import Text

from flashcheck.commands.durations import seconds
from flashcheck.commands.fuzz_view import FuzzView, print_regions, print_summary
from flashcheck.devices import interpret_without_gpu
from flashcheck.errors import ArgumentError
from flashcheck.fuzz.campaign import Budget, Campaign, State
from flashcheck.fuzz.regions import regions
from flashcheck.fuzz.share import default_workers
from flashcheck.fuzz.statistics import failed_statistics
from flashcheck.fuzz.store import Store

FOLDER = Path(".flashcheck") / "fuzz"


@dataclass(frozen=True, slots=True, kw_only=True)
class FuzzRequest:
    """The options of ``fuzz`` as the user gave them."""

    kernel: str
    max_time: str | None = None
    max_cases: int | None = None
    seed: int | None = None
    db: Path | None = None
    resume: bool = False
    workers: int | None = None
    dtypes: tuple[str, ...] = ()
    device: str | None = None
    timeout: float = 60.0
    against: str = ""
    ray: str | None = None
    quiet: bool = False


def run_fuzz(request: FuzzRequest, stdout: Console, stderr: Console) -> int:
    """0 nothing found, 1 something found (also by the statistics), 3 no case was judged, 4 the judge failed,
    130 interrupted.
    """
    interpret_without_gpu()
    device = _device(request)
    budget = Budget(
        seconds=math.inf if request.max_time is None else seconds(request.max_time), cases=request.max_cases
    )
    store = Store(request.db or FOLDER / file_name(request.kernel))
    seed = secrets.randbits(32) if request.seed is None else request.seed
    seed = store.open(request.kernel, seed, request.resume, request.against)
    _ignore(store.folder)
    campaign = _campaign(request, device, store, seed, budget)
    count = campaign.state.workers
    workers = "1 worker" if count == 1 else f"{count} workers"
    head = f"{request.kernel}: seed {seed}, {workers}, campaign {store.folder}"
    stderr.print(Text(head), soft_wrap=True)  # Text: rich would read :name: in a kernel's name as an emoji
    with FuzzView(stderr, request.quiet) as view:
        try:
            state = campaign.run(view)
        except ArgumentError:
            store.forget_empty()
            raise
    print_summary(stdout, state, str(store.folder))
    if request.against:
        print_regions(stdout, regions(store.case_lines()), request.kernel, request.against)
    return exit_code(state)


def _campaign(request: FuzzRequest, device: str, store: Store, seed: int, budget: Budget) -> Campaign:
    where = (request.kernel, device, store, seed, budget)
    workers = request.workers or default_workers(device)
    if request.ray is None:
        return Campaign(
            *where,
            workers=workers,
            dtypes=request.dtypes,
            limit=request.timeout,
            against=request.against,
        )
    if request.against:
        raise ArgumentError("--ray", request.ray, "no --against: the comparison runs on one machine")
    from flashcheck.fuzz.distributed import RayCampaign

    return RayCampaign(*where, address=request.ray, dtypes=request.dtypes, limit=request.timeout)


def exit_code(state: State) -> int:
    if state.interrupted:
        return 130
    if state.totals.faults:
        return 4
    if state.findings or failed_statistics(state.totals.statistics):
        return 1
    return 0 if state.totals.total else 3


def _device(request: FuzzRequest) -> str:
    """Chosen without loading the kernel here: its import may crash. A worker says when it is not declared."""
    import torch

    present = torch.cuda.is_available()
    if request.device is not None:
        if request.device.startswith("cuda") and not present:
            raise ArgumentError("--device", request.device, "a device that is present: cpu")
        return request.device
    return "cuda" if present else "cpu"


def file_name(kernel: str) -> str:
    return re.sub(r"[^A-Za-z0-9_.]+", "-", kernel).strip("-")


def _ignore(folder: Path) -> None:
    """Keeps campaigns out of the user's version control."""
    ignore = folder / ".gitignore"
    if not ignore.exists():
        ignore.write_text("*\n", encoding="utf-8")
