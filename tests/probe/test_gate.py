"""A declared machine that claims too much is refused a verdict, with the field named."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from flashcheck.arithmetic import HOPPER, HOPPER_FP8, IEEE, IEEE_FP32, Accumulator, Machine
from flashcheck.cli import app
from flashcheck.flushing import flushed_formats
from flashcheck.formats import BF16, E4M3, FP32
from flashcheck.probe.findings import CastFinding, ProbeReport
from flashcheck.probe.machine import contradictions, machine_from
from flashcheck.probe.products import measure_products
from flashcheck.probe.run import cached_probe, probe, write_report
from tests.probe.emulated import CPU, emulated


@pytest.fixture(scope="module")
def report():
    return probe(CPU, "gate", ("torch",))


def test_the_usual_models_hold(report):
    assert contradictions(IEEE, report, "torch", ("fp16", "bf16", "fp32")) == []
    assert contradictions(HOPPER, report, "torch", ("fp16", "bf16", "fp32")) == []


def test_the_probed_machine_is_no_wider_than_the_declared_one(report):
    measured = machine_from(report, "torch")
    assert contradictions(measured, report, "torch", ("fp32",)) == []
    for name in ("exp_error", "division_error", "log_absolute", "log_relative"):
        assert 0 < getattr(measured, name) <= getattr(IEEE, name)


@pytest.mark.parametrize("found", ["kept", "flushed"])
def test_products_that_flush_reach_the_probed_machine(report, found):
    """And are in the report as the model of the CPU has them."""
    narrow = {p.operands: p for p in report.products if p.operands in ("fp16", "bf16")}
    flushed = {name for name, p in narrow.items() if "flushed" in (p.subnormal_operands, p.subnormal_sums)}
    assert set(narrow) == {"fp16", "bf16"}
    assert flushed == set(flushed_formats())
    changed = [
        p.model_copy(update={"subnormal_sums": found, "subnormal_operands": found}) for p in narrow.values()
    ]
    measured = machine_from(report.model_copy(update={"products": changed}), "torch")
    assert measured.accumulator(BF16).flush_subnormals == (found == "flushed")
    assert not measured.accumulator(FP32).flush_subnormals


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("exp_error", 2.0**-26),
        ("division_error", 2.0**-26),
        ("log_absolute", 2.0**-26),
        ("log_relative", 2.0**-26),
        ("vector", Accumulator(precision=25)),
    ],
)
def test_a_claim_too_good_is_named(report, field, value):
    lines = contradictions(replace(IEEE, **{field: value}), report, "torch", ("fp32",))
    assert lines
    assert all(field in line for line in lines)
    if field != "vector":
        assert all("declared" in line and "measured" in line for line in lines)


@pytest.mark.parametrize(
    ("declared", "word"),
    [
        (IEEE_FP32, "rounding nearest declared, toward_zero measured"),
        (Accumulator(32, 25, 24, "toward_zero"), "fraction_bits 25 declared, 13 measured"),
        (Accumulator(128, 13, 14, "toward_zero"), "block 128 declared, 32 measured"),
        (HOPPER_FP8, ""),
    ],
)
def test_a_matrix_unit_is_compared_field_by_field(report, declared, word):
    found = measure_products(emulated(E4M3, HOPPER_FP8, inner=128), CPU)
    measured = report.model_copy(update={"products": [found], "functions": [], "additions": []})
    lines = contradictions(Machine("test", {"e4m3": declared}), measured, "triton", ("e4m3",))
    assert bool(lines) == bool(word)
    assert word in " ".join(lines)
    assert contradictions(Machine("test", {"e4m3": declared}), measured, "triton", ("bf16",)) == []


def test_a_wrong_cast_counts_where_its_format_does(report):
    wrong = CastFinding(target="bf16", platform="torch", tested=9, wrong=4, rounding="toward zero")
    measured = report.model_copy(update={"casts": [wrong]})
    assert "bf16" in contradictions(IEEE, measured, "torch", ("bf16",))[0]
    assert contradictions(IEEE, measured, "torch", ("fp16",)) == []


def test_a_report_survives_its_file(report, tmp_path):
    write_report(report, tmp_path / "x.json")
    assert ProbeReport.model_validate_json((tmp_path / "x.json").read_text()) == report


def test_the_second_probe_reads_the_first(tmp_path, monkeypatch):
    first = cached_probe(CPU, "torch", tmp_path)
    monkeypatch.setattr("flashcheck.probe.run.probe", None)
    assert cached_probe(CPU, "torch", tmp_path) == first


MINE = """
from dataclasses import replace
import torch
from flashcheck.arithmetic import IEEE
from flashcheck.kernel import as_kernel

def attention(q, k, v, *, is_causal=False, scale=None):
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=is_causal, scale=scale)

kernel = replace(as_kernel(attention, "mine"), machine=lambda device: replace(IEEE, exp_error=2.0**-26))
"""


def test_certify_refuses_a_verdict_and_says_why(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["flashcheck"])
    Path("mine.py").write_text(MINE)
    arguments = ["certify", "mine.py:kernel", "--max-cases", "1", "--device", "cpu", "--out", "c.json"]
    run = CliRunner().invoke(app, arguments)
    assert run.exit_code == 4, run.output
    assert "JUDGE FAILED" in run.output
    assert "exp_error: declared" in run.output
    certificate = json.loads(Path("c.json").read_text())
    assert certificate["run"]["judged"] == 0
    assert certificate["machine"]["probed"]["machine"]["exp_error"] > 2.0**-26


def test_the_command_prints_every_table_and_writes_json(tmp_path):
    path = tmp_path / "probe.json"
    run = CliRunner().invoke(app, ["probe", "--quick", "--device", "cpu", "--json", str(path), "--no-color"])
    assert run.exit_code in (0, 4), run.output  # 4: the interpreter may be unrepaired in this process
    for words in ("matrix products", "fp32 arithmetic", "casts from fp32", "functions of fp32", "model ieee"):
        assert words in run.output
    assert ProbeReport.model_validate_json(path.read_text()).machines["torch"]["exp_error"] > 0
