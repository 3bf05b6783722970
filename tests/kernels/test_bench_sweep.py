"""The sweep: candidates are legal, a wrong kernel is not chosen, the worker's lines are whole."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from kernels.bench import alternate, sweep
from kernels.bench.candidates import APART, KERNELS, OTHERS, candidates, missed, shape_of, tile_of
from kernels.bench.problems import Size
from kernels.bench.reference import problem, worst_error
from kernels.tuning import HOPPER_HEAD_DIMS, Tile

ROOT = Path(__file__).parents[2]
GROUP = {"kernel": "forward", "head_dim": 64, "causal": True, "tokens": 1024, "width": 128}


@pytest.mark.parametrize("kernel", [*KERNELS, *OTHERS])
def test_candidates(kernel):
    for dim in HOPPER_HEAD_DIMS if kernel in KERNELS else (192,) if kernel in APART else (64, 128):
        assert candidates(kernel, dim)
        tiles = candidates(kernel, dim)
        assert len(set(tiles)) == len(tiles)
        for tile in tiles:
            assert tile.num_warps % 4 == 0
            assert max(tile.block_m, tile.block_n) <= 256
            assert tile_of(shape_of(tile)) == tile


def test_the_tables_tiles_can_be_timed_alone():
    for kernel in KERNELS:
        assert set(sweep._tiles(kernel, 64, True)) < set(sweep._tiles(kernel, 64, False))
        assert sweep._tiles(kernel, 64, True)
    assert sweep._tiles("pipelined", 64, True) == candidates("pipelined", 64)


def test_the_short_list_is_of_candidates():
    """Each of its kernels with something to compare; those that share tensors run in one process."""
    for kernel, dim, _, tiles in missed():
        assert tiles
        assert set(tiles) <= set(candidates(kernel, dim))
    groups = [{"kernel": name, "head_dim": dim, "causal": causal} for name, dim, causal, _ in missed()]
    families = sweep.together(groups)
    assert len(families) == 10
    assert [group for family in families for group in family if group not in groups] == []
    assert sum(map(len, families)) == len(groups)


def test_a_run_that_ends_its_process_is_marked_and_the_rest_go_on(monkeypatch):
    def spawn(work, on_line, _limit):
        for kernel, tile, section in work["runs"]:
            if tile[0] == 64:
                return "exit -11"
            on_line({"kernel": kernel, "tile": tile, "section": section, "error": None})
        return ""

    monkeypatch.setattr(sweep, "_spawn", spawn)
    groups = [
        {"kernel": n, "tiles": [[32, 1], [64, 1], [16, 1]], "sections": [None, 4]} for n in ("dq", "dkdv")
    ]
    for lines in sweep.measure(groups, 60.0).values():
        assert [(x["tile"][0], x["section"], x["error"]) for x in lines] == [
            (rows, section, "exit -11" if rows == 64 else None)
            for rows in (32, 64, 16)
            for section in (None, 4)
        ]


@pytest.mark.skipif(torch.cuda.is_available(), reason="times tiny sizes in the interpreter")
@pytest.mark.parametrize("kernels", [("forward",), ("packed",), ("dkdv", "dq")], ids=str)
def test_candidates_take_turns(kernels, monkeypatch):
    monkeypatch.setattr(alternate, "candidates", lambda *_: [Tile(32, 32, 4, 1)])
    monkeypatch.setattr(alternate, "attention", lambda *_: scaled_dot_product_attention)
    row = alternate._row(kernels, Size(2, 2, 32, 64, True), "cpu")
    other = "FlashAttention-2" if "dq" in kernels else "now"
    assert set(row["least"]) == {other, *(f"{kernel} 32 32 4 1" for kernel in kernels)}
    assert row["errors"] == {}
    assert all(found < 1e-2 for found in row["difference"].values())


@pytest.mark.parametrize("causal", [False, True])
def test_a_wrong_result_is_seen(causal):
    """One lost key in 40, or one NaN, is far outside what is accepted; rounding to bf16 far inside."""
    _, exact = problem((1, 2, 1, 40, 40, 64), causal, "cpu", torch.float64)
    right = (exact["out"].bfloat16(), exact["lse"].float())
    assert worst_error("forward", right, exact) < 0.5
    assert worst_error("forward", (right[0] * 1.05, right[1]), exact) > 1
    spoiled = right[0].clone()
    spoiled[0, 1, 17, 3] = torch.nan
    assert worst_error("forward", (spoiled, right[1]), exact) == float("inf")
    assert worst_error("dq", (exact["dq"].roll(1, 2).bfloat16(),), exact) > 1


@pytest.mark.parametrize("causal", [False, True])
def test_a_wrong_fp8_result_is_seen(causal):
    """Probabilities rounded to e4m3 are far inside; a lost head or a NaN is far outside."""
    tensors, exact = problem((1, 2, 1, 40, 40, 64), causal, "cpu", torch.float64, fp8=True)
    _, q, k, v, lse, _ = tensors
    assert all(torch.equal(x, x.to(torch.float8_e4m3fn).bfloat16()) for x in (q, k, v))
    scores = q.double() @ k.double().mT / 8
    if causal:
        scores = scores.masked_fill(torch.ones(40, 40, dtype=torch.bool).triu(1), -torch.inf)
    rounded = ((scores - exact["lse"][..., None]).exp() * 256).float().to(torch.float8_e4m3fn).double() / 256
    out = (rounded @ v.double()).bfloat16()
    assert 0.05 < worst_error("fp8", (out, lse), exact) < 1
    assert worst_error("forward", (out, lse), exact) > 1
    assert worst_error("fp8", (out.flip(1), lse), exact) > 1
    out[0, 1, 17, 3] = torch.nan
    assert worst_error("fp8", (out, lse), exact) == float("inf")


@pytest.mark.parametrize(
    "change",
    [{"error": "broken"}, {"worst_error": 1.5}, {"repeatable": False}, {"milliseconds": {}}],
    ids=str,
)
def test_only_right_and_repeatable_results_have_a_speed(change):
    line = {"error": None, "worst_error": 0.1, "repeatable": True, "milliseconds": {"1024": 0.5}}
    assert sweep.speed(GROUP, line) == pytest.approx(4 * 2 * 1024**2 * 64 / 2 / 0.5e9)
    assert sweep.speed(GROUP, {**line, **change}) == 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="measures tiny sizes in the interpreter")
@pytest.mark.parametrize("kernel", ["dq", "dk", "dv", "fp8", "packed"])
def test_a_worker_judges_and_times(kernel):
    work = {
        **GROUP,
        "mode": "measure",
        "kernel": kernel,
        "runs": [[kernel, [32, 32, 8, 2], None]],
        "lengths": [40],
        "tokens": 40,
        "milliseconds": 1.0,
    }
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TRITON_INTERPRET": "1"}
    run = subprocess.run(
        [sys.executable, "-m", "kernels.bench.sweep_worker", json.dumps(work)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    (line,) = map(json.loads, run.stdout.splitlines())
    assert line["error"] is None
    assert line["repeatable"]
    assert line["worst_error"] < 1
    assert sweep.usable(line)
