"""What bounds and predictions cost next to the float64 oracle, for the same problem.

    python -m tests.bounds.cost [--device cuda] [--json PATH]

Columns: best of several runs in ms, forward and backward together. The oracle's own time is its forward
and its gradients; the bound's holds worst-case and centred intervals, the prediction's the rms errors.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from flashcheck.arithmetic import ARITHMETICS, HOPPER, IEEE
from flashcheck.bounds.backward import backward_bound
from flashcheck.bounds.forward import forward_bound
from flashcheck.bounds.pairs import Given
from flashcheck.checks.judged import on_device
from flashcheck.emulator.tiles import concrete
from flashcheck.formats import round_nearest
from flashcheck.inputs.spec import ProblemSpec
from flashcheck.oracle import fp64
from flashcheck.problem import Problem

SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {"num_queries": 17, "num_keys": 33, "head_dim": 32},
    "usual": {"num_heads": 2, "num_queries": 64, "num_keys": 64, "head_dim": 64},
    "grouped causal": {
        "num_heads": 8,
        "num_kv_heads": 2,
        "num_queries": 129,
        "num_keys": 129,
        "head_dim": 48,
        "causal": "bottom_right",
    },
    "softcap alibi": {
        "num_heads": 4,
        "num_kv_heads": 4,
        "num_queries": 128,
        "num_keys": 128,
        "head_dim": 64,
        "softcap": 15.0,
        "alibi": True,
    },
    "long": {"num_heads": 2, "num_kv_heads": 2, "num_queries": 512, "num_keys": 512, "head_dim": 64},
    "wide": {"num_heads": 2, "num_kv_heads": 2, "num_queries": 256, "num_keys": 256, "head_dim": 256},
    "huge logits": {
        "num_heads": 2,
        "num_queries": 128,
        "num_keys": 128,
        "head_dim": 64,
        "family": "huge_logits",
    },
}


def problem_of(changes: dict[str, Any], device: torch.device) -> Problem:
    options = {"dtype": "bf16", "num_heads": 1, "num_kv_heads": 1, **changes}
    options["num_kv_heads"] = changes.get("num_kv_heads", options["num_heads"])
    options["value_dim"] = options["head_dim"]
    problem = ProblemSpec(**options, seed=1).build()
    generator = torch.Generator().manual_seed(2)
    shape = (problem.batch, problem.num_heads, problem.num_queries, problem.value_dim)
    dout = torch.randn(shape, generator=generator).to(problem.q.dtype)
    return on_device(problem.replaced(dout=dout), device)


def best(run: Callable[[], object], seconds: float, device: torch.device) -> float:
    """The shortest of the runs that fit into ``seconds`` (three at least), in ms."""

    def timed() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize()
        # On a CPU the processor's own time: a busy machine does not count.
        clock = time.perf_counter if device.type == "cuda" else time.process_time
        started = clock()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize()
        return clock() - started

    run()
    times: list[float] = []
    while len(times) < 3 or sum(times) < seconds:
        times.append(timed())
    return 1e3 * min(times)


def measure(problem: Problem, preset: str, device: torch.device, seconds: float) -> dict[str, float]:
    arithmetic = concrete(ARITHMETICS[preset])
    machine = HOPPER if device.type == "cuda" else IEEE
    exact = fp64.forward(problem)
    out = round_nearest(exact.out, arithmetic.output_format).to(problem.q.dtype)
    given = Given(out, exact.lse.float())
    gradients = fp64.backward(problem, given.out, given.lse)

    def oracle() -> None:
        fp64.forward(problem)
        fp64.backward(problem, given.out, given.lse)

    def bounds(*, predictions: bool = True) -> None:
        bound = forward_bound(problem, exact, arithmetic, machine)
        backward = backward_bound(problem, exact, gradients, given, arithmetic, machine, bound.scores)
        for tensor in (bound.out, bound.lse, *backward.tensors.values()):
            tensor.centred  # noqa: B018
            if predictions:
                tensor.predicted_rms  # noqa: B018

    reference, both = best(oracle, seconds, device), best(bounds, seconds, device)
    bound = min(best(lambda: bounds(predictions=False), seconds, device), both)
    return {"oracle": reference, "bound": bound, "prediction": both - bound, "ratio": both / reference}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument(
        "--preset", default="flash.bf16", choices=[n for n in ARITHMETICS if n.endswith("bf16")]
    )
    parser.add_argument("--seconds", type=float, default=0.5, help="per measurement")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    device = torch.device(options.device)
    torch.set_num_threads(1)
    rows = {}
    print(f"{'shape':16s} {'oracle ms':>10s} {'bound ms':>10s} {'prediction':>11s} {'(b+p)/oracle':>13s}")
    for name, changes in SHAPES.items():
        row = measure(problem_of(changes, device), options.preset, device, options.seconds)
        rows[name] = row
        cells = f"{row['oracle']:10.2f} {row['bound']:10.2f} {row['prediction']:11.2f} {row['ratio']:13.2f}"
        print(f"{name:16s} {cells}", flush=True)
    if options.json is not None:
        data = {
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor(),
            "torch": torch.__version__,
            "preset": options.preset,
            "milliseconds": rows,
        }
        options.json.write_text(json.dumps(data, indent=1) + "\n")


if __name__ == "__main__":
    main()
