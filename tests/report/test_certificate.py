"""The certificate's file: current schema, older formats, problems that rebuild exactly, sizes."""

from __future__ import annotations

import json
import math
from pathlib import Path

import jsonschema
import pytest

from flashcheck.detail import Detail, Point
from flashcheck.errors import ArgumentError
from flashcheck.inputs.spec import ProblemSpec
from flashcheck.report import build
from flashcheck.report.certificate import SCHEMA, Certificate, read, schema_json, write
from flashcheck.report.upgrade import problem_id

ROOT = Path(__file__).parents[2]
GOLDEN = sorted((ROOT / "golden" / "certificates").glob("*.json"))


def test_the_published_schema_is_current() -> None:
    assert SCHEMA.read_text(encoding="utf-8") == schema_json(), (
        'python -c "from flashcheck.report.certificate import *; SCHEMA.write_text(schema_json())"'
    )


def test_certificates_meet_the_schema_and_a_broken_one_does_not(
    honest: Certificate, rejected: Certificate, infinite: Certificate
) -> None:
    validator = jsonschema.Draft202012Validator(json.loads(SCHEMA.read_text()))
    for certificate in (honest, rejected, infinite):
        validator.validate(json.loads(certificate.to_json()))
    broken = json.loads(honest.to_json()) | {"verdict": "fine"}
    assert not validator.is_valid(broken)
    assert not validator.is_valid(json.loads(honest.to_json()) | {"opinion": "good"})


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.name)
def test_recorded_certificates_load(path: Path) -> None:
    certificate = read(path)
    assert Certificate.from_json(certificate.to_json()) == certificate
    assert certificate.kernel.load_name
    for tensor in certificate.tensors:
        assert tensor.worst_problem in certificate.problems


def test_a_certificate_of_the_first_format_is_upgraded(honest: Certificate) -> None:
    """The first format, written out by hand from a current one."""
    data = json.loads(honest.to_json())
    old = {k: v for k, v in data.items() if k not in ("problems", "pictures")} | {"format_version": 1}
    later = ("worst_inputs_sha256", "rms_error", "rms_predicted", "histogram", "points")
    old["tensors"] = [
        {k: v for k, v in t.items() if k not in later}
        | {"worst_problem": data["problems"][t["worst_problem"]]}
        for t in data["tensors"]
    ]
    old["kernel"] = {k: v for k, v in data["kernel"].items() if k not in ("load_name", "backward")}
    old["machine"] = {k: v for k, v in data["machine"].items() if k != "probe"}
    old["coverage"] = {k: v for k, v in data["coverage"].items() if k != "undeclared"}
    old["run"] = {k: v for k, v in data["run"].items() if k != "durations"}
    certificate = Certificate.from_json(json.dumps(old))
    assert certificate.format_version == 2
    assert certificate.kernel.load_name == honest.kernel.load_name
    for new, known in zip(certificate.tensors, honest.tensors, strict=True):
        assert (new.worst, new.worst_problem, new.rms_ratio) == (
            known.worst,
            known.worst_problem,
            known.rms_ratio,
        )


def test_every_problem_id_rebuilds_its_problem(honest: Certificate) -> None:
    for key, spec in honest.problems.items():
        assert problem_id(ProblemSpec.from_json(spec).to_json()) == key
    for tensor in honest.tensors:
        spec = ProblemSpec.from_json(honest.problems[tensor.worst_problem or ""])
        assert build.inputs_sha256(spec) == tensor.worst_inputs_sha256
        other = ProblemSpec.from_json(spec.to_json() | {"seed": spec.seed + 1})
        assert build.inputs_sha256(other) != tensor.worst_inputs_sha256


def test_points_and_histogram_add_up(honest: Certificate) -> None:
    for tensor in honest.tensors:
        h, points = tensor.histogram, tensor.points
        assert h is not None
        assert points is not None
        assert h.exact + sum(h.bins) + h.above == tensor.elements
        assert h.above == tensor.over_bound == 0
        assert not any(math.isnan(error) for error in points.error)
        assert max(points.margin) == tensor.worst_margin
        assert tensor.worst_problem in points.problem
        assert set(points.problem) <= set(honest.problems)
        for error, bound, margin in zip(points.error, points.bound, points.margin, strict=True):
            assert (margin <= 1) == (error <= bound)


def test_points_are_capped_and_keep_the_worst() -> None:
    detail = Detail()
    for n in range(1701):
        detail.points.append(Point(ProblemSpec(seed=n), 0.1, 1.0, 0.9 if n == 1234 else 0.1, None, None))
    part = build._points(detail, problems := {})
    assert len(part.problem) <= build.MOST_POINTS + 1
    assert max(part.margin) == 0.9
    assert problems[part.problem[part.margin.index(0.9)]]["seed"] == 1234


def test_infinities_survive(infinite: Certificate) -> None:
    again = Certificate.from_json(infinite.to_json())
    (tensor,) = [t for t in again.tensors if t.tensor == "O"]
    assert math.isinf(tensor.worst_margin)
    assert tensor.points is not None
    assert math.isinf(tensor.points.error[0])
    assert tensor.histogram is not None
    assert tensor.histogram.above == tensor.over_bound > 0


def test_what_is_not_declared_is_in_plain_sight(honest: Certificate) -> None:
    assert {"backward", "option softcap", "option window", "zero keys"} <= set(honest.coverage.undeclared)
    assert "log-sum-exp" not in honest.coverage.undeclared
    assert honest.kernel.backward is False


def test_durations_add_up_to_the_run(honest: Certificate) -> None:
    assert set(honest.run.durations) == {"bf16"}
    assert 0 < honest.run.durations["bf16"] <= honest.run.seconds


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{}", "verdict: Field required"),
        ("not json", "a flashcheck certificate"),
        ('{"format_version": 99}', "format_version"),
        (None, "a file that can be read"),
    ],
)
def test_anything_else_is_one_clear_error(tmp_path: Path, text: str | None, words: str) -> None:
    path = tmp_path / "x.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ArgumentError, match="CERT = ") as caught:
        read(path)
    assert words in str(caught.value)


def test_writing_replaces_whole_files(tmp_path: Path, honest: Certificate) -> None:
    path = tmp_path / "folder" / "c.json"
    write(honest, path)
    write(honest, path)
    assert [p.name for p in path.parent.iterdir()] == ["c.json"]
    assert read(path) == honest


def test_a_kernels_file_is_told_from_the_working_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert build._shown(str(tmp_path / "mine" / "kernel.py")) == "mine/kernel.py"
    assert build._shown(str(tmp_path.parent / "kernel.py")) == str(tmp_path.parent / "kernel.py")
    assert build._shown("torch 2.13.0 matmul, softmax") == "torch 2.13.0 matmul, softmax"
