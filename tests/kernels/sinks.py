"""Sinks beside scores of any size: the weights are 0 and powers of two, so every bit of O is known.

On a GPU products are fused into subtractions: the rounding error of a maximum of 2^33 is then a factor of
2^512, unless the kernels see to it that the base of a row weighs exactly 1.
"""

from __future__ import annotations

import torch

import kernels
from kernels import interpreter
from kernels.score_path import parse_score_path
from tests.kernels.exactness import exact_problem

SIZES = (1.0, 1.1 * 2.0**20, 1.1 * 2.0**26, 1.3 * 2.0**90)
"""Factors of scores that are 128 where they are largest."""
FUSED_END = 2.0**24
"""Past 2^31 the fused form of the softmax step (bf16, fp32) is not finite: its declaration says so."""
PATHS = (
    (torch.float16, None),
    (torch.bfloat16, None),
    (torch.float32, None),
    (torch.float8_e4m3fn, None),
    (torch.bfloat16, "e4m3"),
)


def sink_faults(case, device):
    """Of one (dtype, score path, size): what is wrong, as text; for the forward and for decoding."""
    interpreter.repair()
    dtype, score, size = case
    if (
        size >= FUSED_END
        and not parse_score_path(dtype, score, None, None, False, True, False).subtract_first
    ):
        return []
    problem, scale = exact_problem(dtype, 64, device, num_queries=20, num_keys=72)
    q, k, v = problem.q, problem.k, problem.v
    nothing = torch.zeros(q.shape[1], device=device)
    calls = {"forward": lambda **o: kernels.forward(q, k, v, score=score, **o)}
    if score is None:
        calls["decode"] = lambda **o: kernels.flash_decode(q, k, v, num_splits=2, return_lse=True, **o)
    wrong = []
    for name, call in calls.items():
        out, _ = call(scale=scale * size, sink=nothing)
        exact = problem.answers["out"].to(out.dtype).to(device)
        loose = 1e-4 if dtype == torch.float32 else 0.0
        if not bool(((out - exact).abs() <= loose).all()):
            wrong.append(f"{name}, sink 0: O is not exact")
        # A sink above every score takes all the weight, and is the log-sum-exp.
        large = nothing + 128.0 * size * 3
        out, lse = call(scale=scale * size, sink=large)
        if not bool((out == 0).all()) or not torch.allclose(lse, large[None, :, None], rtol=1e-6):
            wrong.append(f"{name}, sink above all: O is not 0 or LSE not the sink")
        # As large as the largest score, to the bit: it counts as one more key with a value of 0.
        if score is None and dtype in (torch.bfloat16, torch.float16):
            equal = nothing + 128.0 * size
            out, _ = call(scale=scale * size, sink=equal)
            if not bool(torch.isfinite(out).all()):
                wrong.append(f"{name}, sink as large as the scores: O is not finite")
    return wrong
