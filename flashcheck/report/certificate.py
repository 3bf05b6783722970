"""The certificate: everything a run found, as data that any program can read.

All other reports derive from it. Infinities and NaN are written as strings, because JSON has neither
and a worst margin of inf must not become null.
"""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

FORMAT_VERSION: Literal[1] = 1


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", ser_json_inf_nan="strings")


class KernelPart(_Part):
    """The subject: its name, where it comes from, and what it declares."""

    name: str
    source: str
    source_sha256: str
    capabilities: dict[str, Any]
    arithmetic: dict[str, dict[str, Any]]
    """Declared arithmetic per dtype, for a 128 x 128 problem of head dim 64."""


class MachinePart(_Part):
    """The device and the model of its arithmetic."""

    device: str
    model: dict[str, Any]
    platform: str
    processor: str
    probed: dict[str, Any] | None = None
    """What ``flashcheck probe`` measured on this device: the machine that it implies, and its scope."""


class Element(_Part):
    """One element, its values as hex floats."""

    tensor: str
    index: tuple[int, ...]
    got: str
    exact: str
    bound: float
    margin: float


class TensorPart(_Part):
    """One output tensor of one dtype."""

    dtype: str
    tensor: str
    cases: int
    elements: int
    over_bound: int
    worst_margin: float
    worst: Element | None
    worst_problem: dict[str, Any] | None
    rms_ratio: float | None
    rms_standard_error: float | None
    rms_judged: bool
    """The ratio was sharp enough to reject by; otherwise it is information only."""
    special_passed: int
    special_total: int
    verdict: Literal["pass", "fail"]


class CheckPart(_Part):
    """How often one check passed, failed or did not apply, for one dtype."""

    dtype: str
    check: str
    passed: int
    failed: int
    not_applicable: int


class FindingPart(_Part):
    """One kind of failure."""

    check: str
    dtype: str
    message: str
    cases: int
    where: Element | None
    problem: str
    spec: dict[str, Any] | None
    evidence: list[str]
    likely: list[str]


class SlackPart(_Part):
    """Median of bound / |error| for one family; "Infinity": every element was exact."""

    dtype: str
    family: str
    tensor: str
    median_slack: float
    problems: int


class CoveragePart(_Part):
    """What the declaration obliges, per dtype, and what was not judged of it."""

    required: list[str]
    missing: dict[str, list[str]]


class RunPart(_Part):
    """How the run was made."""

    level: str
    seed: int
    dtypes: list[str]
    planned: int
    judged: int
    seconds: float
    started: str
    stopped: str
    command: str


class Certificate(_Part):
    """A kernel's certificate."""

    format_version: Literal[1] = FORMAT_VERSION
    verdict: Literal["certified", "rejected", "incomplete", "judge failed"]
    kernel: KernelPart
    machine: MachinePart
    versions: dict[str, str]
    run: RunPart
    tensors: list[TensorPart]
    checks: list[CheckPart]
    findings: list[FindingPart]
    slack: list[SlackPart]
    coverage: CoveragePart
    judge_faults: list[str]

    def to_json(self) -> str:
        """Indented JSON; infinities and NaN as strings."""
        return json.dumps(json.loads(self.model_dump_json()), indent=1, ensure_ascii=False) + "\n"

    @staticmethod
    def from_json(text: str) -> Certificate:
        """The inverse of ``to_json``; raises pydantic's ValidationError for anything else."""
        return Certificate.model_validate_json(text)


def write(certificate: Certificate, path: Path) -> None:
    """Writes atomically: a reader sees the old file or the whole new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(certificate.to_json())
        os.chmod(temporary, 0o644)  # mkstemp makes it private
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
