"""A campaign's directory: everything that a run learns, safe against kill -9 and shared by several runs.

campaign.json         the kernel and the seed
shards/000012         claimed: every shard number is taken once, whichever run takes it
cases/RUN-WORKER.jsonl  a line per judged case; one writer a file, append-only
findings/ID.json      one per group; test_ID.py is its stand-alone repro
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from flashcheck.errors import ArgumentError
from flashcheck.fuzz.case import FORMAT_VERSION, FuzzCase
from flashcheck.fuzz.files import locked, read_lines, write_json
from flashcheck.fuzz.groups import Failure, Group


@dataclass(frozen=True, slots=True)
class Finding:
    """One bug, as stored.

    Attributes:
        kernel, device: what failed where.
        group: which failures it stands for; failure: the one of ``case``.
        case: the smallest case; first: the one that was found first.
        cases: failures seen; after_cases, after_seconds: when the first came.
        reproduces: repetitions that failed again with the same bits, of how many.
        script: the command that runs the stand-alone repro, or why there is none.
    """

    kernel: str
    device: str
    group: Group
    failure: Failure
    case: FuzzCase
    first: FuzzCase
    cases: int = 1
    after_cases: int = 0
    after_seconds: float = 0.0
    reproduces: tuple[int, int] = (0, 0)
    script: str = ""

    @property
    def id(self) -> str:
        return self.group.id

    def to_json(self) -> dict[str, Any]:
        data = asdict(replace(self, case=None, first=None))  # type: ignore[arg-type]
        data |= {"case": self.case.to_json(), "first": self.first.to_json()}
        return {"format_version": FORMAT_VERSION, "id": self.id} | data

    @staticmethod
    def from_json(data: dict[str, Any]) -> Finding:
        """The inverse of ``to_json``; raises ArgumentError for a version that this code does not read."""
        if data.get("format_version") != FORMAT_VERSION:
            raise ArgumentError("finding format_version", data.get("format_version"), str(FORMAT_VERSION))
        failure: dict[str, Any] = {
            k: tuple(v) if isinstance(v, list) else v for k, v in data["failure"].items()
        }
        return Finding(
            kernel=data["kernel"],
            device=data["device"],
            group=Group(
                data["group"]["check"], tuple(data["group"]["classes"]), tuple(data["group"].get("looks", ()))
            ),
            failure=Failure(**failure),
            case=FuzzCase.from_json(data["case"]),
            first=FuzzCase.from_json(data["first"]),
            cases=data["cases"],
            after_cases=data["after_cases"],
            after_seconds=data["after_seconds"],
            reproduces=tuple(data["reproduces"]),
            script=data["script"],
        )


def read_finding(path: Path) -> Finding:
    """Raises ArgumentError where the file is not a finding."""
    try:
        return Finding.from_json(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, KeyError, TypeError, json.JSONDecodeError) as error:
        raise ArgumentError("finding", str(path), f"a finding that fuzz wrote ({error})") from None


@dataclass(frozen=True, slots=True)
class Store:
    """Reads and writes one campaign directory."""

    folder: Path
    run: str = field(default_factory=lambda: f"{time.time_ns():x}-{os.getpid()}")

    def open(self, kernel: str, seed: int, resume: bool, against: str = "") -> int:
        """Creates the campaign or, with ``resume``, goes on with it; the campaign's seed.

        Raises ArgumentError where there is one and ``resume`` is False, or it is another kernel's.
        """
        path = self.folder / "campaign.json"
        with locked(self.folder / ".lock"):
            if not path.exists():
                own = {"kernel": kernel, "against": against, "seed": seed, "created": time.time()}
                write_json(path, {"format_version": FORMAT_VERSION} | own)
                return seed
            if not resume:
                raise ArgumentError(
                    "--db", str(self.folder), "a folder without a campaign; --resume goes on with this one"
                )
            data = json.loads(path.read_text(encoding="utf-8"))
        for option, asked in (("kernel", kernel), ("against", against)):
            if data[option] != asked:
                raise ArgumentError(
                    "--db", str(self.folder), f"the campaign of {data[option] or 'one kernel'}"
                )
        return int(data["seed"])

    def forget_empty(self) -> None:
        """Undoes ``open`` where no case was judged: another try is no second campaign."""
        with locked(self.folder / ".lock"):
            if not any(True for _ in self.case_lines()):
                (self.folder / "campaign.json").unlink(missing_ok=True)

    def claim_shard(self) -> int:
        """The next shard number, taken by no other process."""
        folder = self.folder / "shards"
        folder.mkdir(parents=True, exist_ok=True)
        number = max((int(p.name) for p in folder.iterdir()), default=-1) + 1
        while True:
            try:
                os.close(os.open(folder / f"{number:06d}", os.O_CREAT | os.O_EXCL | os.O_WRONLY))
                return number
            except FileExistsError:
                number += 1

    def case_log(self, writer: str) -> Path:
        return self.folder / "cases" / f"{self.run}-{writer}.jsonl"

    def case_lines(self) -> Iterator[dict[str, Any]]:
        """Every judged case, of all runs."""
        for path in sorted((self.folder / "cases").glob("*.jsonl")):
            yield from read_lines(path)

    def unfinished(self) -> list[FuzzCase]:
        """A case for each group that was seen to fail and of which there is no finding: a run was killed
        while it shrank it, or it became one with another finding since."""
        known = {finding.id for finding in self.findings()}
        first: dict[str, FuzzCase] = {}
        for line in self.case_lines():
            if "group" in line and line["group"] not in known:
                first.setdefault(line["group"], FuzzCase.from_json(line["case"]))
        return list(first.values())

    def finding_path(self, name: str) -> Path:
        return self.folder / "findings" / f"{name}.json"

    def findings(self) -> list[Finding]:
        """All, in the order of their files' names."""
        return [read_finding(path) for path in sorted((self.folder / "findings").glob("*.json"))]

    def known(self) -> tuple[Group, ...]:
        return tuple(finding.group for finding in self.findings())

    def add(self, finding: Finding) -> Finding:
        """Stores a finding; those that its group holds become one with it: the better case stays."""
        with locked(self.folder / ".lock"):
            for known in self.findings():
                if known.group.holds(finding.failure) or finding.group.holds(known.failure):
                    finding = _merged(known, finding)
                    self._remove(known)
            write_json(self.finding_path(finding.id), finding.to_json())
        return finding

    def absorb(self, other: Finding, failure: Failure, into: str) -> None:
        """Makes ``other`` one with the finding called ``into``: judged again, its failure is one of those."""
        with locked(self.folder / ".lock"):
            findings = {f.id: f for f in self.findings()}
            if other.id in findings and into in findings and other.id != into:
                kept = findings[into]
                cases = kept.cases + findings[other.id].cases
                self._remove(other)
                kept = replace(kept, group=kept.group.joined(failure), cases=cases)
                write_json(self.finding_path(into), kept.to_json())

    def _remove(self, finding: Finding) -> None:
        self.finding_path(finding.id).unlink(missing_ok=True)


def _merged(known: Finding, new: Finding) -> Finding:
    """One finding under the known one's name, with the stronger check or else the smaller case."""
    if known.group.yields_to(new.failure) or new.group.yields_to(known.failure):
        better = new if known.group.yields_to(new.failure) else known
    else:
        # Of cases alike the one whose repro is written: the other is the same one, not yet confirmed.
        sizes = [(f.case.size, len(f.case.tensors or ""), not f.script) for f in (known, new)]
        better = new if sizes[1] < sizes[0] else known
    group = replace(known.group.joined(new.failure), check=better.group.check)
    return replace(
        known,
        group=group if group.id == known.id else replace(known.group, check=better.group.check),
        case=better.case,
        failure=better.failure,
        reproduces=better.reproduces,
        script=better.script,
        cases=known.cases + new.cases,
    )
