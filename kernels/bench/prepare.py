"""Compiles what a run of `kernels.bench` will need into the caches, one problem a process.

Run as a program with one JSON argument: {"batch", "heads", "length", "head_dim", "causal"}, or {"extra"}, the
name of a measurement beside the grid.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from kernels.bench.problems import Size

_ROOT = Path(__file__).parents[2]


def compile_ahead(sizes: Sequence[Size], seconds: float, extras: Sequence[str] = ()) -> list[bool]:
    """Compile for all problems at once, for ``seconds`` at most; which processes ended well, extras last.

    Args:
        extras: names of `kernels.bench.extras` to compile for.
    """
    works = [*(asdict(size) for size in sizes), *({"extra": name} for name in extras)]
    environment = {**os.environ, "PYTHONPATH": str(_ROOT), "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    deadline = time.monotonic() + seconds
    running = [
        subprocess.Popen(
            [sys.executable, "-m", "kernels.bench.prepare", json.dumps(work)],
            cwd=_ROOT,
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for work in works
    ]
    done = []
    try:
        for process in running:
            try:
                done.append(process.wait(max(0.1, deadline - time.monotonic())) == 0)
            except subprocess.TimeoutExpired:
                done.append(False)
    finally:
        for process in running:
            process.kill()
            process.wait()
    return done


def main() -> None:
    import torch

    from kernels.bench.methods import FLEX, OURS, attention

    work = json.loads(sys.argv[1])
    if "extra" in work:
        from kernels.bench.extras import EXTRAS, Scale

        EXTRAS[work["extra"]](Scale("cuda", 0.0))
        return
    size = Size(**work)
    q, k, v, dout = size.tensors("cuda", 4)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    for name in (OURS, FLEX):
        out = attention(name, size.causal, size.length, "cuda")(*leaves)
        torch.autograd.grad(out, leaves, dout, retain_graph=True)
    torch.cuda.synchronize()


if __name__ == "__main__":
    main()
