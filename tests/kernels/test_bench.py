"""The benchmark: what counts, what is left out, and that a whole run goes through."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kernels.bench import goals, readme, tables, traffic
from kernels.bench.extras import COMPILING, EXTRAS
from kernels.bench.grid import LARGEST_DIFFERENCE, difference, measure, ratio, tflops
from kernels.bench.methods import CUDNN, EAGER, FLASH2, OURS
from kernels.bench.problems import size
from kernels.bench.timing import rotations

ROOT = Path(__file__).parents[2]


def entry(forward, backward, **more):
    kinds = {"forward": {"tflops": forward}, "backward": {"tflops": backward}}
    return {"error": None, "difference": 1e-3, **kinds, **more}


def row(head_dim=64, **methods):
    return {"head_dim": head_dim, "length": 4096, "causal": False, "methods": methods}


def test_only_right_results_count():
    good = row(**{OURS: entry(300.0, 200.0), CUDNN: entry(400.0, 400.0)})
    assert ratio(good, CUDNN, "forward") == 0.75
    assert ratio(good, CUDNN, "backward") == 0.5
    assert ratio(good, FLASH2, "forward") is None
    for change in ({"error": "broken"}, {"difference": 2 * LARGEST_DIFFERENCE}, {"difference": float("inf")}):
        bad = row(**{OURS: entry(300.0, 200.0, **change), CUDNN: entry(400.0, 400.0)})
        assert tflops(bad, OURS, "forward") is None
        assert ratio(bad, CUDNN, "forward") is None


def test_ratios_are_geometric_means_or_the_least():
    rows = [
        row(**{OURS: entry(100.0, 50.0), CUDNN: entry(200.0, 50.0), FLASH2: entry(50.0, 10.0)}),
        row(**{OURS: entry(200.0, 50.0), CUDNN: entry(100.0, 50.0), FLASH2: entry(40.0, 10.0)}),
        row(128, **{OURS: entry(300.0, 50.0), CUDNN: entry(100.0, 50.0), FLASH2: entry(100.0, 10.0)}),
    ]
    record = {"cudnn": 1, "grid": rows, "extras": {"packed": {"error": "out of time"}}}
    judged = {goal["goal"]: goal for goal in goals.judged(record)}
    assert judged["forward / cuDNN, d=64, mean"]["ratio"] == pytest.approx(1.0)
    assert judged["forward / cuDNN, d=64, mean"]["reached"] == "target"
    assert judged["forward / FlashAttention-2, least"]["ratio"] == pytest.approx(2.0)
    assert judged["forward / FlashAttention-2, least"]["reached"] == "stretch"
    assert judged["forward / flex_attention, least"]["reached"] == "not measured"
    assert judged["forward packed uniform / dense"]["reached"] == "not measured"
    assert "not measured" in tables.goals(list(judged.values()))
    assert all(goal["ratio"] is None for goal in goals.judged({**record, "cudnn": None}))


def test_a_difference_with_a_nan_is_infinite():
    x = torch.randn(10)
    spoiled = x.clone()
    spoiled[3] = torch.nan
    assert difference([x], [x]) == 0
    assert difference([x, spoiled], [x, x]) == float("inf")


def test_a_method_that_fails_is_recorded_and_the_others_go_on(device):
    problem = size(16, 32, False, 32, 16)
    methods = [EAGER, CUDNN, FLASH2]
    measured = measure(problem, methods, device.type, 1.0, EAGER, {FLASH2: "out of time"})
    assert measured["methods"][EAGER]["forward"]["milliseconds"] > 0
    assert measured["methods"][FLASH2] == {"error": "out of time"}
    if device.type == "cpu":
        assert measured["methods"][CUDNN]["error"]
    text = tables.row(measured, methods)
    assert "out of time" in text
    assert "eager" in text


@pytest.mark.skipif(torch.cuda.is_available(), reason="tiny problems in the interpreter")
def test_a_whole_run(tmp_path):
    record, figure = tmp_path / "run.json", tmp_path / "run.svg"
    command = [sys.executable, "-m", "kernels.bench", "--head-dims", "64", "--seconds", "60"]
    environment = {n: x for n, x in os.environ.items() if n != "TRITON_INTERPRET"} | {"PYTHONPATH": str(ROOT)}
    run = subprocess.run(
        [*command, "--json", record, "--figure", figure, "--quick"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    found = json.loads(record.read_text())
    assert [row["causal"] for row in found["grid"]] == [False, True]
    for measured in found["grid"]:
        assert measured["methods"][OURS]["error"] is None
        assert measured["methods"][OURS]["difference"] < LARGEST_DIFFERENCE
    assert set(found["extras"]) >= {"memory", "eager", "head dims", "packed", "grouped", "host", "fp8"}
    assert all(goal["reached"] == "not measured" for goal in found["goals"])
    assert "ratio of speeds" in run.stdout
    assert "no figure" in run.stdout or figure.read_text().startswith("<?xml")


def test_bytes_are_read_from_the_profiler():
    head = '"ID","Kernel Name","Metric Name","Metric Unit","Metric Value"\n'
    lines = [
        f'"{i}","kernel{i}","dram__bytes_{way}.sum","{unit}","{value}"\n'
        for i in range(4)
        for way, unit, value in (("read", "byte", "405,798,912"), ("write", "Mbyte", "136.314880"))
    ]
    launches = traffic.counted("==PROF== noise\n" + head + "".join(lines))
    rows = traffic.compared(launches)
    assert [row["kernel"] for row in rows] == ["kernel0", "kernel1", "kernel2", "kernel3"]
    # 8 * 32 heads of 4096 queries at dim 64: q, k, v and O in 2 bytes, a log-sum-exp in 4.
    assert rows[0]["fewest"] == 8 * 32 * 4096 * (4 * 64 * 2 + 4)
    assert rows[0]["bytes"] == 405798912 + 136314880
    with pytest.raises(ValueError, match="3 launches"):
        traffic.compared(launches[:3])
    with pytest.raises(ValueError, match="no table"):
        traffic.counted("==ERROR== no permission")


def test_readme_says_what_was_recorded():
    text, record = readme.README.read_text(), json.loads(readme.RECORD.read_text())
    assert readme.with_tables(text, record) == text, "write it anew: python -m kernels.bench.readme"
    record["grid"][0]["methods"][OURS]["forward"]["tflops"] = 1234.0
    assert "| 1234 |" in readme.with_tables(text, record)
    with pytest.raises(ValueError, match="no block ratios"):
        readme.with_tables("", record)


def test_extras_with_goals_come_first():
    """Where they run out of time, what has no goal is missing."""
    wanted = [name for name in EXTRAS if any(uses(goal, name) for goal in goals.GOALS)]
    assert list(EXTRAS)[: len(wanted)] == wanted
    assert set(wanted) <= set(COMPILING) <= set(EXTRAS)


def uses(goal, extra):
    """Whether the goal's value changes with that measurement."""
    every = {kind: 2.0 for kind in ("forward ratio", "backward ratio")}
    names = ("96", "192", "uniform", "ragged", "e4m3", "e4m3, v's keys contiguous")
    return goal.value({"grid": [], "extras": {extra: dict.fromkeys(names, every)}}) is not None


def test_every_run_is_the_first_of_a_round():
    assert rotations(["a", "b", "c"], 4) == [list("abc"), list("bca"), list("cab"), list("abc")]
    assert rotations([], 2) == [[], []]
