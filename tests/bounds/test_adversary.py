"""Small runs of the adversary, the soundness run and the sensitivity study: they work, and find nothing."""

import json
from dataclasses import replace

import pytest

from flashcheck.arithmetic import ARITHMETICS
from flashcheck.inputs.spec import ProblemSpec
from flashcheck.loading import load
from tests.bounds import adversary, sensitivity, soundness
from tests.long_run import spread_out


@pytest.mark.parametrize("preset", ["emulator.flash.bf16", "emulator.hopper.flash.e4m3"])
def test_the_adversary_stays_inside_the_bounds(preset):
    best = adversary.search(load(preset), 12, largest=17)
    assert best.tried >= 12
    assert {"O", "LSE"} <= set(best.margins)
    assert all(margin <= 1 for margin in best.margins.values()), best


def test_rows_that_see_no_key_add_nothing_to_the_sinks_gradient():
    """Found by the adversary: with a sink such a row has a finite LSE; its gradient must not count."""
    spec = ProblemSpec(dtype="bf16", num_queries=5, num_keys=2, causal="bottom_right", sink=True)
    assert adversary.margins_of(load("emulator.flash.bf16"), spec)["dSink"] <= 1


def test_the_adversary_finds_a_kernel_that_declares_too_little():
    """fp16 probabilities declared, e4m3 used: the climb passes 1 at once."""
    kernel = load("emulator.flash.e4m3")
    declared = replace(ARITHMETICS["flash.e4m3"], probability_format=ARITHMETICS["flash.fp16"].input_format)
    best = adversary.search(replace(kernel, arithmetic=lambda _: declared), 10, largest=17)
    assert best.margins["O"] > 1


def test_a_soundness_run_goes_on_where_it_ended(tmp_path):
    parts = {"emulator.flash.fp16": 1, "torch.sdpa.math": 1}
    whole = soundness.Run(parts, 3, tmp_path / "whole.json")
    whole.go(4)
    first = soundness.Run(parts, 3, tmp_path / "parts.json")
    first.go(2)
    second = soundness.Run(parts, 3, tmp_path / "parts.json")
    assert second.done == 2
    second.go(4)
    one, other = (json.loads((tmp_path / f"{name}.json").read_text()) for name in ("whole", "parts"))
    assert one["lines"] == other["lines"]
    assert one["faults"] == []
    assert all(line["worst"] <= 1 for line in one["lines"].values())
    assert "emulator.flash.fp16" in second.table()


def test_a_soundness_run_keeps_what_lies_outside(monkeypatch, tmp_path):
    kernel = load("torch.sdpa.math")
    off = replace(kernel, forward=lambda p: replace(kernel.forward(p), out=kernel.forward(p).out * 1.5))
    monkeypatch.setattr(soundness, "load", lambda _: off)
    run = soundness.Run({"torch.sdpa.math": 1}, 3, tmp_path / "x.json")
    run.go(2)
    lines = json.loads((tmp_path / "x.json").read_text())["lines"].values()
    assert any(line["over"] and line["kept"] for line in lines)


def test_every_kernel_has_its_share_of_cases():
    order = spread_out({"a": 3, "b": 1})
    assert sorted(order) == ["a", "a", "a", "b"]


def test_one_more_rounding_of_p_is_rejected_and_an_honest_run_is_not(tmp_path):
    path = tmp_path / "s.json"
    arguments = ["--honest", "1", "--faults", "1", "--size", "6", "--presets", "flash.bf16"]
    assert sensitivity.main([*arguments, "--json", str(path)]) == 0
    found = json.loads(path.read_text())["presets"]["flash.bf16"]
    assert found["none"]["rejected"] == 0
    assert found["P rounded once more, same precision"]["rejected"] == 1
    assert found["P truncated"]["by"]["forward.cast_of_p"] == 1
