"""The certificate: everything a run found, as data that any program can read.

All other reports derive from it. Infinities and NaN are written as strings, because JSON has neither
and a worst margin of inf must not become null. ``certificate.schema.json`` beside this file is the JSON
Schema of the current format; older formats are upgraded as they are read (``upgrade.py``).
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core import core_schema

from flashcheck.errors import ArgumentError
from flashcheck.files import write_atomically
from flashcheck.report.upgrade import upgraded

FORMAT_VERSION: Literal[2] = 2

SCHEMA = Path(__file__).with_name("certificate.schema.json")


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", ser_json_inf_nan="strings")


class KernelPart(_Part):
    """The subject: its name, where it comes from, and what it declares."""

    name: str
    load_name: str
    """What ``flashcheck certify`` loads it by; empty for a kernel that was given as an object."""
    source: str
    source_sha256: str
    capabilities: dict[str, Any]
    arithmetic: dict[str, dict[str, Any]]
    """Declared arithmetic per dtype, for a 128 x 128 problem of head dim 64."""
    backward: bool
    """The kernel declares a backward."""


class MachinePart(_Part):
    """The device and the model of its arithmetic."""

    device: str
    model: dict[str, Any]
    probe: dict[str, Any] | None = None
    """What was measured of the device's arithmetic, where it was."""
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


class HistogramPart(_Part):
    """All margins of one tensor: no error at all, bins of equal width over (0, 1], above 1."""

    exact: int
    bins: list[int]
    above: int


class PointsPart(_Part):
    """One entry per problem in every list: its worst element and its rms error.

    At most a few hundred, evenly taken from the run, the largest margin always among them. Rms errors are
    relative to the rms of the exact values; null where nothing is predicted.
    """

    problem: list[str]
    error: list[float]
    bound: list[float]
    margin: list[float]
    rms_error: list[float | None]
    rms_predicted: list[float | None]


class PicturePart(_Part):
    """A matrix over one head of a tensor's worst problem, thinned to a small grid (largest value per cell).

    ``margin``: margins by row and column of the tensor. ``key_share``: by row and key,
    p_ij max_d |v_jd - o_id|, what a unit relative error of p_ij moves in the output.
    """

    dtype: str
    tensor: str
    kind: Literal["margin", "key_share"]
    problem: str
    head: tuple[int, int]
    """Batch entry and head."""
    size: tuple[int, int]
    """Rows and columns before thinning."""
    worst: tuple[int, int | None]
    """Row and column of the worst element; no column in ``key_share``."""
    values: list[list[float]]


class TensorPart(_Part):
    """One output tensor of one dtype."""

    dtype: str
    tensor: str
    cases: int
    elements: int
    over_bound: int
    worst_margin: float
    worst: Element | None
    worst_problem: str | None
    """Key of ``problems``."""
    worst_inputs_sha256: str | None
    """Of that problem's tensors, so that a rebuilt problem is known to be the same."""
    rms_ratio: float | None
    rms_standard_error: float | None
    rms_judged: bool
    """The ratio was sharp enough to reject by; otherwise it is information only."""
    rms_error: float | None
    """Median over ordinary problems of the rms error, relative to the rms of the exact values."""
    rms_predicted: float | None
    histogram: HistogramPart | None
    points: PointsPart | None
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
    """In words."""
    problem_id: str | None
    """Key of ``problems``; null where a group of problems was judged."""
    evidence: list[str]
    likely: list[str]


class SlackPart(_Part):
    """Median of bound / |error| for one family; "Infinity": every element was exact."""

    dtype: str
    family: str
    tensor: str
    median_slack: float
    problems: int


class OraclePart(_Part):
    """Rows of one family that each rung of the oracle served; ``unresolved``: those whose reference is
    not proved good enough by any rung."""

    dtype: str
    family: str
    direction: Literal["forward", "backward"]
    fp64: int
    double_double: int
    exact: int
    unresolved: int


class CoveragePart(_Part):
    """What the declaration obliges, per dtype, and what was not judged of it."""

    required: list[str]
    missing: dict[str, list[str]]
    undeclared: list[str]
    """What attention can have and the kernel does not declare: never judged."""
    pairs: dict[str, tuple[int, int]] = {}
    """dtype -> pairs of declared option values: judged, and how many there are."""
    triples: dict[str, tuple[int, int]] = {}
    """The same for triples."""


class RunPart(_Part):
    """How the run was made."""

    level: str
    seed: int
    dtypes: list[str]
    planned: int
    judged: int
    seconds: float
    durations: dict[str, float]
    """Seconds per dtype."""
    started: str
    stopped: str
    command: str


class Certificate(_Part):
    """A kernel's certificate."""

    format_version: Literal[2] = FORMAT_VERSION
    verdict: Literal["certified", "rejected", "incomplete", "judge failed"]
    kernel: KernelPart
    machine: MachinePart
    versions: dict[str, str]
    run: RunPart
    tensors: list[TensorPart]
    checks: list[CheckPart]
    findings: list[FindingPart]
    slack: list[SlackPart]
    oracle: list[OraclePart] = []
    coverage: CoveragePart
    tilings: dict[str, str] = {}
    """dtype -> which tile size and order explain the bits, for a kernel that declares none. Informative."""
    problems: dict[str, dict[str, Any]]
    """Problem id -> the spec that rebuilds it exactly (``flashcheck.inputs.spec.ProblemSpec``)."""
    pictures: list[PicturePart]
    judge_faults: list[str]

    def to_json(self) -> str:
        """Indented JSON, lists of numbers on one line; infinities and NaN as strings."""
        text = json.dumps(json.loads(self.model_dump_json()), indent=1, ensure_ascii=False)
        return _FLAT_LIST.sub(lambda match: f"[{' '.join(match[1].split())}]", text) + "\n"

    @staticmethod
    def from_json(text: str) -> Certificate:
        """The inverse of ``to_json``, for older formats too.

        Raises pydantic's ValidationError, or json's JSONDecodeError, for anything else.
        """
        return Certificate.model_validate_json(json.dumps(upgraded(json.loads(text))))


# A list without lists or objects in it; json.dumps breaks the line after the bracket, no string holds one.
_FLAT_LIST = re.compile(r"\[\n\s*([^\[\]{}]+?)\s*\n\s*\]")


class _WithInfinities(GenerateJsonSchema):
    """Numbers may be written as "Infinity", "-Infinity" or "NaN"."""

    def float_schema(self, schema: core_schema.FloatSchema) -> JsonSchemaValue:
        return {"anyOf": [super().float_schema(schema), {"enum": ["Infinity", "-Infinity", "NaN"]}]}


def schema_json() -> str:
    """The JSON Schema of the current format, as it stands in ``SCHEMA``."""
    body = Certificate.model_json_schema(schema_generator=_WithInfinities)
    schema = {"$schema": GenerateJsonSchema.schema_dialect, **body}
    return json.dumps(schema, indent=1) + "\n"


def read(path: Path) -> Certificate:
    """The certificate in ``path``; raises ArgumentError, naming the file, for anything else."""
    try:
        return Certificate.from_json(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ArgumentError("CERT", path, f"a file that can be read ({error.strerror})") from None
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"]) or "the whole"
        raise ArgumentError("CERT", path, f"a flashcheck certificate ({place}: {first['msg']})") from None
    except ValueError as error:
        raise ArgumentError("CERT", path, f"a flashcheck certificate ({error})") from None


def write(certificate: Certificate, path: Path) -> None:
    """Writes atomically: a reader sees the old file or the whole new one."""
    write_atomically(path, certificate.to_json())
