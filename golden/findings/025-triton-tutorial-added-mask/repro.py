"""Triton's tutorial 06-fused-attention: a hidden score beside a large one.

    python repro.py FILE      (or FLASHCHECK_TRITON_TUTORIAL=FILE)

Key 0 has the score 0, key 1 the one that is printed, in every row; row 0 sees key 0 alone, so its O is that
key's value, 1. Without a GPU the tile on the diagonal is computed in float64 as the source writes it, without
the file. Exit code 1: a number is wrong.
"""

import importlib.util
import math
import os
import sys

import torch
from torch import Tensor

LENGTH, DIM, SCALE = 128, 64, 0.125
SIZES = (4.0e5, 6.0e5, 8.0e5, 2.0e6)
"""1e6 ln 2 = 693,147 is where the score of key 1, in base 2 and less 1e6, passes that of key 0."""


def as_written(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """``qk * qk_scale + tl.where(mask, 0, -1.0e6)``, whatever the size of the scores."""
    scores = q.double() @ k.double().mT * SCALE * math.log2(math.e)
    hidden = torch.ones_like(scores, dtype=torch.bool).triu(1)
    return ((scores + torch.where(hidden, -1.0e6, 0.0)) * math.log(2)).softmax(-1) @ v.double()


def by_the_file(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    path = sys.argv[1] if len(sys.argv) > 1 else os.environ["FLASHCHECK_TRITON_TUTORIAL"]
    spec = importlib.util.spec_from_file_location("tutorial", path)
    tutorial = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tutorial)
    return tutorial.attention(q.cuda(), k.cuda(), v.cuda(), True, SCALE, False).cpu()


gpu = torch.cuda.is_available()
print(torch.__version__, torch.cuda.get_device_name() if gpu else "no GPU: as the source writes it")
wrong = 0
for size in SIZES:
    q, k, v = (torch.zeros(1, 1, LENGTH, DIM, dtype=torch.float16) for _ in range(3))
    q[..., 0], k[..., 1, 0] = 1000.0, size / 1000.0 / SCALE
    v[..., 0, :], v[..., 1, :] = 1.0, -1.0
    found = float((by_the_file if gpu else as_written)(q, k, v)[0, 0, 0, 0])
    wrong += found != 1.0
    print(f"a hidden score of {size:.0e}: O = {found:g}, 1 is right")
sys.exit(wrong > 0)
