"""Compiled flex_attention with a dense mask and bias, and with a wider v: does it compile? Needs a GPU.

Exit code 1: a call as it comes does not, for want of shared memory.
"""

import sys

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention

print(torch.__version__, torch.cuda.get_device_name())
queries, keys = 128, 128
mask = torch.rand(queries, keys, device="cuda") < 0.9
bias = torch.randn(queries, keys, device="cuda")


def score_mod(score: Tensor, _b: Tensor, _h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return torch.where(mask[i, j], score + bias[i, j], -float("inf"))


compiled = torch.compile(flex_attention, dynamic=False)
wrong = 0
for dims, mod in (((64, 64), score_mod), ((128, 256), score_mod), ((128, 256), None)):
    for kernel_options in ({}, {"fwd_num_stages": 1, "bwd_num_stages": 1}):
        q, k, v = (
            torch.randn(1, 1, n, d, dtype=torch.bfloat16, device="cuda", requires_grad=True)
            for n, d in ((queries, dims[0]), (keys, dims[0]), (keys, dims[1]))
        )
        case = f"head dims {dims}, {'mask and bias' if mod else 'plain'}, {kernel_options or 'as it comes'}"
        try:
            compiled(q, k, v, score_mod=mod, kernel_options=kernel_options).sum().backward()
            print(f"{case}: compiles")
        except Exception as error:
            line = next((x for x in str(error).splitlines() if "Required" in x), str(error).splitlines()[0])
            print(f"{case}: {type(error).__name__}: {line.strip()}")
            wrong += not kernel_options
sys.exit(wrong > 0)
