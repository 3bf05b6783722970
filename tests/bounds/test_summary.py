"""Soundness runs add up to one table."""

import json

import pytest

from tests.bounds import summary
from tests.bounds.soundness import Run

PARTS = {"emulator.flash.fp16": 1}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    paths = [folder / f"{seed}.json" for seed in (1, 2)]
    for seed, path in enumerate(paths):
        Run(PARTS, seed, path).go(3)
    return paths


def test_runs_add_up(files, tmp_path):
    out = tmp_path / "all.json"
    assert summary.main([*map(str, files), "--out", str(out)]) == 0
    found, runs = json.loads(out.read_text()), [json.loads(path.read_text()) for path in files]
    line, parts = found["lines"]["emulator.flash.fp16 fp16 O"], []
    for run in runs:
        parts.append(run["lines"]["emulator.flash.fp16 fp16 O"])
    assert line["elements"] == sum(x["elements"] for x in parts) > 0
    assert line["worst_margin"] == round(max(x["worst"] for x in parts), 4)
    assert found["problems"] == line["cases"] == 6
    assert found["over"] == 0
    assert [run["seed"] for run in found["runs"]] == [0, 1]


def test_runs_that_do_not_belong_together_are_refused(files):
    one, other = (json.loads(path.read_text()) for path in files)
    with pytest.raises(SystemExit, match="seed"):
        summary.summary([one, one])
    other["versions"] = {**other["versions"], "torch": "0"}
    with pytest.raises(SystemExit, match="versions"):
        summary.summary([one, other])
