"""Triton's tutorial 06-fused-attention: a causal call after one that was not causal. Needs a GPU.

    python repro.py FILE      (or FLASHCHECK_TRITON_TUTORIAL=FILE)

Exit code 1: a causal result is wrong that is right when the causal call comes first.
"""

import importlib.util
import os
import sys

os.environ.pop("PYTEST_VERSION", None)  # under pytest the file tunes nothing

import torch
import triton

path = sys.argv[1] if len(sys.argv) > 1 else os.environ["FLASHCHECK_TRITON_TUTORIAL"]
spec = importlib.util.spec_from_file_location("tutorial", path)
tutorial = importlib.util.module_from_spec(spec)
spec.loader.exec_module(tutorial)

DIM = 128
WRONG = 0.01
"""Far from the largest error of a right result, 0.001, and from the smallest of a wrong one, 0.5."""


def error(length: int, causal: bool) -> tuple[float, str]:
    """Largest difference from float64, and the tiles that were taken."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, length, DIM, dtype=torch.float16, device="cuda") for _ in range(3))
    out = tutorial.attention(q, k, v, causal, DIM**-0.5, False)
    scores = q.double() @ k.double().mT * DIM**-0.5
    if causal:
        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -torch.inf)
    tiles = tutorial._attn_fwd.best_config.kwargs
    exact = scores.softmax(-1) @ v.double()
    return float((out.double() - exact).abs().max()), f"{tiles['BLOCK_M']} x {tiles['BLOCK_N']}"


print(torch.__version__, "triton", triton.__version__, torch.cuda.get_device_name())
wrong = 0
for length in (256, 1024, 2048, 4096):
    for order in ((False, True), (True,)):
        tutorial._attn_fwd.cache.clear()  # as in a new process
        for causal in order:
            off, tiles = error(length, causal)
            wrong += off > WRONG
            after = "" if not causal else ", after the other" if len(order) > 1 else ", first"
            verdict = "  WRONG" if off > WRONG else ""
            print(f"{length} x {DIM} causal={causal}{after}: tiles {tiles}, off by {off:.4f}{verdict}")
sys.exit(wrong > 0)
