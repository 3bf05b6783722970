"""One part of a sweep in a process of its own: a fault of the device ends this process, not the sweep.

Run by `kernels.bench.sweep`; takes one JSON argument and prints one JSON line a candidate:
    {"mode": "compile", "kernel", "tiles": [[...]], "head_dim", "causal", "lengths", "tokens", "width"}
    {"mode": "measure", "kernel", "runs": [[kernel, tile, section], ...], "milliseconds", ...}
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from kernels.bench.calls import Tensors, call
from kernels.bench.candidates import tile_of
from kernels.bench.problems import size
from kernels.bench.reference import problem, worst_error
from kernels.options import parse_options

_REPEATS = 5


def _say(line: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


def _empty_tensors(work: dict[str, Any], length: int) -> Tensors:
    shape = size(work["head_dim"], length, work["causal"], work["tokens"], work["width"])
    dout, q, k, v = shape.tensors("cpu", 4, seed=-1)
    row = torch.empty(q.shape[:3])
    return dout, q, k, v, row, row


def compile_group(work: dict[str, Any]) -> None:
    """Fill Triton's cache, and say what the assembler made of each candidate."""
    from kernels import tuning
    from kernels.bench.offline import attempt, compile_only, resources

    tuning.architecture = cache(lambda _device: "sm90")
    compiled = compile_only()
    tensors = _empty_tensors(work, work["lengths"][0])
    options = parse_options(tensors[1], tensors[2], causal="bottom_right" if work["causal"] else None)
    for shape in work["tiles"]:
        compiled.clear()
        error = attempt(call(work["kernel"], tensors, options, tile_of(shape)))
        line = {"tile": shape, "error": error}
        if compiled:
            line |= resources(compiled[-1])
        _say(line)


def _milliseconds(run: Callable[[], Any], budget: float) -> float:
    if not torch.cuda.is_available():
        start = time.perf_counter()
        run()
        return (time.perf_counter() - start) * 1e3
    from triton.testing import do_bench

    return float(do_bench(run, warmup=budget / 4, rep=budget, return_mode="median"))


def measure_group(work: dict[str, Any]) -> None:
    """Judge each candidate on two problems, then time it on every length."""
    from kernels import interpreter

    interpreter.repair()
    kernel, dim, causal = work["kernel"], work["head_dim"], work["causal"]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    mask = "bottom_right" if causal else None
    if device == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = False
        warm = torch.randn(8192, 8192, device=device, dtype=torch.bfloat16)
        for _ in range(100):
            warm @ warm
    # Lengths with tails, multiples of 16 so that they share the timed problems' compilation; and the
    # shortest timed problem, whole.
    fp8, batch = "fp8" in kernel, 2 if "packed" in kernel else 1
    odd = problem(
        (batch, 16, 16, 304, 336, dim) if device == "cuda" else (batch, 2, 1, 20, 37, dim),
        causal,
        device,
        torch.float64,
        fp8,
    )
    short = size(dim, work["lengths"][0], causal, work["tokens"], work["width"])
    whole = problem(
        (short.batch, short.heads, short.heads, short.length, short.length, dim),
        causal,
        device,
        torch.float32,
        fp8,
    )
    timed = [(short, whole[0])]
    for length in work["lengths"][1:]:
        longer = size(dim, length, causal, work["tokens"], work["width"])
        dout, q, k, v = longer.tensors(device, 4)
        row = torch.full(q.shape[:3], 9.0, device=device)
        timed.append((longer, (dout, q, k, v, row, row * 0)))
    for run_kernel, shape, section in work["runs"]:
        line: dict[str, Any] = {"kernel": run_kernel, "tile": shape, "section": section, "error": None}
        tile = tile_of(shape)
        try:
            for tensors, exact in (odd, whole):
                options = parse_options(tensors[1], tensors[2], causal=mask)
                run = call(run_kernel, tensors, options, tile, section)
                got = run()
                line["worst_error"] = max(line.get("worst_error", 0.0), worst_error(run_kernel, got, exact))
                repeats = [run() for _ in range(_REPEATS if device == "cuda" else 1)]
                same = all(torch.equal(a, b) for again in repeats for a, b in zip(got, again, strict=True))
                line["repeatable"] = line.get("repeatable", True) and same
            for problem_size, tensors in timed:
                options = parse_options(tensors[1], tensors[2], causal=mask)
                spent = _milliseconds(call(run_kernel, tensors, options, tile, section), work["milliseconds"])
                line.setdefault("milliseconds", {})[str(problem_size.length)] = spent
        except Exception as error:
            line["error"] = f"{type(error).__name__}: {error}"[:300]
        _say(line)
        if line["error"] and "CUDA" in line["error"] and "resource" not in line["error"]:
            return  # the context may be lost: a new process goes on with the next candidate


def main() -> None:
    work = json.loads(sys.argv[1])
    (compile_group if work["mode"] == "compile" else measure_group)(work)


if __name__ == "__main__":
    main()
