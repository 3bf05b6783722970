"""Speed of the kernels beside cuDNN, FlashAttention-2 and compiled flex_attention, in one run.

bf16, forward and backward, lengths 1k, 4k and 16k of 16k tokens, heads * dim = 2048; medians of calls that
take turns. Prints the speeds, the ratios beside their goals, and what else is claimed of flash attention;
without a GPU, tiny problems in the interpreter, whose times mean nothing.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import triton

from kernels.interpreter import interpreted

# Of the budget: what compiling ahead may take, and after what flex_attention is no longer compiled.
_COMPILE_SHARE, _GRID_SHARE = 0.55, 0.85


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m kernels.bench", description=__doc__)
    parser.add_argument("--json", type=Path, help="write all results to this file")
    parser.add_argument("--figure", type=Path, help="draw speed against length (needs matplotlib)")
    parser.add_argument("--quick", action="store_true", help="length 4096 only, and shorter timings")
    parser.add_argument("--seconds", type=float, default=230, help="budget for everything (default 230)")
    parser.add_argument("--head-dims", default="128,64", help="default 128,64")
    parser.add_argument("--no-flex", action="store_true", help="leave out flex_attention, which must compile")
    return parser.parse_args()


def _versions() -> dict[str, Any]:
    on_gpu = torch.cuda.is_available()
    cudnn = torch.backends.cudnn.version() if on_gpu else None  # type: ignore[no-untyped-call]
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "device": torch.cuda.get_device_name() if on_gpu else "interpreter: not a speed",
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cudnn": cudnn,
        "cuda": torch.version.cuda,
    }


def main() -> int:
    arguments = _arguments()
    if not torch.cuda.is_available() and not interpreted():
        environment = {**os.environ, "TRITON_INTERPRET": "1"}
        os.execve(sys.executable, [sys.executable, "-m", "kernels.bench", *sys.argv[1:]], environment)
    start = time.monotonic()
    on_gpu = torch.cuda.is_available()
    from kernels.bench import extras, goals, tables
    from kernels.bench.figure import draw
    from kernels.bench.grid import brief, measure
    from kernels.bench.methods import EAGER, FLASH2, FLEX, OURS, RIVALS
    from kernels.bench.prepare import compile_ahead
    from kernels.bench.problems import TOKENS, WIDTH, Size, size

    budget = 30.0 if arguments.quick else 75.0
    lengths: tuple[int, ...] = (4096,) if arguments.quick else (4096, 16384, 1024)
    tokens, width = (TOKENS, WIDTH) if on_gpu else (extras.TINY.tokens, extras.TINY.width)
    lengths = lengths if on_gpu else extras.TINY.lengths[: len(lengths)]
    scale = extras.Scale("cuda", budget / 2) if on_gpu else extras.TINY
    methods = [OURS, *RIVALS] if on_gpu else [OURS, EAGER]
    if arguments.no_flex and FLEX in methods:
        methods.remove(FLEX)
    dims = [int(dim) for dim in arguments.head_dims.split(",")]
    sizes = [size(d, n, causal, tokens, width) for n in lengths for d in dims for causal in (False, True)]
    record: dict[str, Any] = {**_versions(), "grid": [], "extras": {}}

    def left() -> float:
        return float(arguments.seconds) - (time.monotonic() - start)

    def save() -> None:
        record["seconds"] = time.monotonic() - start
        record["goals"] = goals.judged(record)
        if arguments.json is not None:
            part = arguments.json.with_suffix(".part")
            part.write_text(json.dumps(record, indent=1) + "\n")
            part.replace(arguments.json)

    tables.say(tables.head(record))
    late: set[Size] = set()
    if FLEX in methods:
        done = compile_ahead(sizes, min(90.0, _COMPILE_SHARE * arguments.seconds), extras.COMPILING)
        spent = time.monotonic() - start
        record["compiled ahead"] = {"problems": len(done), "done": sum(done), "seconds": spent}
        tables.say(f"compiled ahead: {sum(done)} of {len(done)} problems, {spent:.0f} s")
        late = {problem for problem, ready in zip(sizes, done, strict=False) if not ready}
    reference = FLASH2 if on_gpu else EAGER
    try:
        for problem in sizes:
            skip = {FLEX: "not compiled in time"} if problem in late else {}
            if left() < (1 - _GRID_SHARE) * arguments.seconds:
                skip[FLEX] = "out of time"
            if left() < 5:
                skip = dict.fromkeys(methods, "out of time")
            row = measure(problem, methods, scale.device, budget, reference, skip)
            record["grid"].append(row)
            tables.say(tables.row(row, methods))
            save()
        for name, measured in extras.EXTRAS.items():
            if left() < 5:
                record["extras"][name] = {"error": "out of time"}
                continue
            try:
                record["extras"][name] = measured(scale)
            except Exception as error:
                record["extras"][name] = {"error": brief(error)}
            if on_gpu:
                torch.cuda.empty_cache()
            save()
    except KeyboardInterrupt:
        tables.say("interrupted; what there is:")
    save()
    tables.say(tables.extras(record["extras"]))
    tables.say(tables.goals(record["goals"]))
    if arguments.figure is not None:
        try:
            draw(record, arguments.figure)
        except ImportError as error:
            tables.say(f"no figure: {error}; pip install matplotlib")
    tables.say(f"{time.monotonic() - start:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
