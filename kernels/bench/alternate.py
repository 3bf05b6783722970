"""Launch configurations that take turns, for a GPU that is shared: ``python -m kernels.bench.alternate``.

What `kernels.bench.sweep` times one after the other, this times in turn, in one process, beside what calls
run now (forward) or FlashAttention-2 (backward). Others that use the GPU meanwhile slow all of them alike;
the least times are nearest to what each needs alone. Results are compared with what runs now, no more: the
sweep and `tests.kernels.on_gpu` judge them.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch

from kernels.bench.calls import call
from kernels.bench.candidates import candidates, shape_of
from kernels.bench.grid import brief, difference
from kernels.bench.methods import FLASH2, attention
from kernels.bench.problems import TOKENS, WIDTH, Size, size
from kernels.bench.sweep import compile_all
from kernels.bench.timing import Run, samples
from kernels.interface import forward
from kernels.options import parse_options

_GLUON = ("pipelined-persistent", "pipelined")
_ROUNDS, _MILLISECONDS = 10, 40.0
# (what is timed together, head dim), most wanted first
_PLAN: tuple[tuple[tuple[str, ...], int], ...] = (
    (("dkdv", "dq"), 192),
    (("packed",), 128),
    (_GLUON, 96),
    (_GLUON, 128),
    ((*_GLUON, "forward"), 192),
    (_GLUON, 64),
)


def _runs(kernels: tuple[str, ...], problem: Size, device: str) -> dict[str, Run]:
    """Name -> call."""
    dout, q, k, v = problem.tensors(device, 4)
    causal = "bottom_right" if problem.causal else None
    parsed = parse_options(q, k, causal=causal)
    runs: dict[str, Run] = {}
    if "dq" not in kernels:
        runs["now"] = partial(forward, q, k, v, causal=causal)
        lse = torch.zeros(q.shape[:3], device=device)
    else:
        _, lse = forward(q, k, v, causal=causal)
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        out = attention(FLASH2, problem.causal, problem.length, device)(*leaves)
        runs[FLASH2] = lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True)
    tensors = (dout, q, k, v, lse, torch.zeros_like(lse))
    for kernel in kernels:
        for tile in candidates(kernel, problem.head_dim):
            name = f"{kernel} {tile.block_m} {tile.block_n} {tile.num_warps} {tile.num_stages}"
            runs[name] = call(kernel, tensors, parsed, tile)
    return runs


def _row(kernels: tuple[str, ...], problem: Size, device: str) -> dict[str, Any]:
    runs, errors, differences = _runs(kernels, problem, device), {}, {}
    expected = runs["now"]() if "now" in runs else None
    for name in list(runs):
        try:
            got = runs[name]()
            if expected is not None:
                differences[name] = difference(got, expected)
        except Exception as error:
            errors[name] = brief(error)
            del runs[name]
    times = samples(runs, _MILLISECONDS, _ROUNDS)
    return {
        "kernels": kernels,
        "head_dim": problem.head_dim,
        "length": problem.length,
        "causal": problem.causal,
        "least": {name: min(found) for name, found in times.items()},
        "median": {name: statistics.median(found) for name, found in times.items()},
        "difference": differences,
        "errors": errors,
    }


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m kernels.bench.alternate", description=__doc__)
    parser.add_argument("--json", type=Path, required=True, help="where to write all results")
    parser.add_argument("--seconds", type=float, default=110, help="budget for everything (default 110)")
    parser.add_argument("--workers", type=int, default=12, help="compiling processes (default 12)")
    arguments = parser.parse_args()
    start = time.monotonic()
    device = "cuda"
    lengths = (4096, 16384, 1024)
    compiling = [
        {
            "kernel": kernel,
            "head_dim": dim,
            "causal": causal,
            "tiles": [shape_of(tile) for tile in candidates(kernel, dim)],
            "lengths": [1024],
            "tokens": TOKENS,
            "width": WIDTH,
        }
        for kernels, dim in _PLAN
        for kernel in kernels
        for causal in (False, True)
        if kernel != "pipelined-persistent"
    ]
    compiled = compile_all(compiling, arguments.workers, 0.5 * arguments.seconds)
    record: dict[str, Any] = {
        "compiled": compiled,
        "seconds to compile": time.monotonic() - start,
        "rows": [],
    }
    for kernels, dim in _PLAN:
        for length in lengths:
            for causal in (False, True):
                if time.monotonic() - start > arguments.seconds:
                    continue
                try:
                    row = _row(kernels, size(dim, length, causal), device)
                except Exception as error:
                    row = {"head_dim": dim, "length": length, "causal": causal, "error": brief(error)}
                record["rows"].append(row)
                sys.stdout.write(json.dumps(row) + "\n")
                sys.stdout.flush()
                arguments.json.write_text(json.dumps(record, indent=1) + "\n")
                torch.cuda.empty_cache()
    return 0


if __name__ == "__main__":
    sys.exit(main())
