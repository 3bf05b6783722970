"""``verify`` confirms numbers bit for bit or says what differs; ``compare`` finds precision regressions."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from flashcheck.commands.compare import comparison_markdown, run_compare
from flashcheck.commands.verify import run_verify
from flashcheck.errors import ArgumentError, UnknownNameError
from flashcheck.report.certificate import Certificate, write
from flashcheck.report.compare import compare, limits_from


class Screen:
    """What a command printed."""

    def __init__(self) -> None:
        self.console = Console(record=True, width=160, quiet=False, file=io.StringIO())

    @property
    def text(self) -> str:
        return self.console.export_text(clear=False)


@pytest.fixture
def screen() -> Screen:
    return Screen()


def _file(tmp_path: Path, certificate: Certificate) -> Path:
    path = tmp_path / "c.json"
    write(certificate, path)
    return path


def _changed(certificate: Certificate, tensor: int = 0, **fields: object) -> Certificate:
    tensors = list(certificate.tensors)
    tensors[tensor] = tensors[tensor].model_copy(update=fields)
    return certificate.model_copy(update={"tensors": tensors})


def test_every_number_comes_out_again(tmp_path: Path, honest: Certificate, screen: Screen) -> None:
    assert run_verify(_file(tmp_path, honest), None, None, None, screen.console) == 0
    assert "CONFIRMED  subject: all 2 recorded numbers, bit for bit" in screen.text


def test_one_bit_is_noticed(tmp_path: Path, honest: Certificate, screen: Screen) -> None:
    worst = honest.tensors[0].worst
    assert worst is not None
    got = float.fromhex(worst.got)
    other = worst.model_copy(update={"got": (got * (1 + 2.0**-52)).hex()})
    path = _file(tmp_path, _changed(honest, worst=other))
    assert run_verify(path, None, None, None, screen.console) == 1
    assert "NOT CONFIRMED" in screen.text
    assert "1 of 2" in screen.text
    assert got.hex() in screen.text


def test_changed_inputs_are_noticed(tmp_path: Path, honest: Certificate, screen: Screen) -> None:
    path = _file(tmp_path, _changed(honest, worst_inputs_sha256="0" * 64))
    assert run_verify(path, None, None, None, screen.console) == 1
    assert "inputs" in screen.text


def test_another_version_is_named_and_is_not_a_rejection(
    tmp_path: Path, honest: Certificate, screen: Screen
) -> None:
    changed = honest.model_copy(update={"versions": {**honest.versions, "torch": "1.0"}})
    path = _file(tmp_path, _changed(changed, worst_inputs_sha256="0" * 64))
    assert run_verify(path, None, None, None, screen.console) == 3
    assert "torch version: was 1.0" in screen.text
    assert "DIFFERS" in screen.text


def test_findings_are_run_again(tmp_path: Path, rejected: Certificate, screen: Screen) -> None:
    path = _file(tmp_path, rejected)
    assert run_verify(path, None, None, None, screen.console) == 0
    assert "forward.bound" in screen.text
    mended = Screen()
    code = run_verify(path, "tests.interface.subjects:honest", None, None, mended.console)
    assert code == 1
    assert "passes now" in mended.text


def test_a_worse_kernel_in_place_of_the_recorded_one(
    tmp_path: Path, honest: Certificate, screen: Screen
) -> None:
    path = _file(tmp_path, honest)
    assert run_verify(path, "tests.interface.subjects:wrong_lse", None, None, screen.console) == 1
    assert "now outside the bound" in screen.text


def test_one_problem_is_the_repro_of_a_finding(tmp_path: Path, rejected: Certificate, screen: Screen) -> None:
    (finding,) = rejected.findings
    path = _file(tmp_path, rejected)
    assert run_verify(path, None, None, finding.problem_id, screen.console) == 1
    assert "LSE is in base 2" in screen.text
    assert finding.where is not None
    assert finding.where.got in screen.text
    with pytest.raises(UnknownNameError, match="--problem"):
        run_verify(path, None, None, "nothing", screen.console)


def test_a_kernel_given_as_an_object_needs_a_name(
    tmp_path: Path, honest: Certificate, screen: Screen
) -> None:
    anonymous = honest.kernel.model_copy(update={"load_name": ""})
    path = _file(tmp_path, honest.model_copy(update={"kernel": anonymous}))
    with pytest.raises(ArgumentError, match="--kernel"):
        run_verify(path, None, None, None, screen.console)


def test_the_same_twice_is_no_regression(tmp_path: Path, honest: Certificate, screen: Screen) -> None:
    path = _file(tmp_path, honest)
    assert run_compare(path, path, (), False, screen.console) == 0
    assert "NO REGRESSION" in screen.text


@pytest.mark.parametrize(
    ("limit", "regressed"), [((), True), (("margin:19%",), True), (("margin:21%",), False)]
)
def test_a_grown_margin(honest: Certificate, limit: tuple[str, ...], regressed: bool) -> None:
    grown = _changed(honest, tensor=1, worst_margin=honest.tensors[1].worst_margin * 1.2)
    assert compare(honest, grown, limits_from(limit)).regressed is regressed
    assert compare(grown, honest).regressed is False


def test_a_grown_rms_on_the_same_problems(honest: Certificate) -> None:
    points = honest.tensors[0].points
    assert points is not None
    rms = [None if x is None else x * 1.06 for x in points.rms_error]
    grown = _changed(honest, points=points.model_copy(update={"rms_error": rms}))
    (row, _) = compare(honest, grown).rows
    assert row.pairs > 10
    assert "+6 %" in row.worse[0]
    assert not compare(honest, grown, limits_from(["rms:7%"])).regressed


def test_what_is_no_longer_judged_is_a_regression(honest: Certificate) -> None:
    less = honest.model_copy(update={"tensors": honest.tensors[:1]})
    assert "LSE is no longer judged" in compare(honest, less).worse[0]
    missing = honest.coverage.model_copy(update={"missing": {"bf16": ["grouped heads"]}})
    lost = compare(honest, honest.model_copy(update={"coverage": missing, "verdict": "incomplete"}))
    assert len(lost.worse) == 2
    assert "grouped heads" in lost.worse[1]
    narrower = honest.coverage.model_copy(update={"required": honest.coverage.required[1:]})
    assert compare(honest, honest.model_copy(update={"coverage": narrower})).regressed


def test_markdown_of_a_regression(honest: Certificate, rejected: Certificate) -> None:
    text = comparison_markdown(honest, rejected, compare(honest, rejected))
    assert text.startswith("### REGRESSED  subject")
    assert "- verdict: certified became rejected" in text
    assert "| bf16 | LSE |" in text


def test_limits_are_checked() -> None:
    assert limits_from(["margin:0.3", "rms:2%"]) == {"margin": 0.3, "rms": 0.02}
    with pytest.raises(ArgumentError, match="--fail-if"):
        limits_from(["speed:10%"])
