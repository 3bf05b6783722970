"""FlashAttention-4's backward for Hopper by head dim: does it compile? Tensors without storage, so no GPU.

Exit code 1: a head dim that the package accepts does not.
"""

import os
import sys
from importlib.metadata import version

os.environ |= {
    "FLASH_ATTENTION_ARCH": "sm_90",
    "CUTE_DSL_ARCH": "sm_90a",
    "FLASH_ATTENTION_NUM_SMS": "132",
}

import torch
from flash_attn.cute.interface import _flash_attn_bwd
from torch._subclasses.fake_tensor import FakeTensorMode

print(f"flash-attn-4 {version('flash-attn-4')}, nvidia-cutlass-dsl {version('nvidia-cutlass-dsl')}")
wrong = 0
with FakeTensorMode():
    for dim in (96, 104, 112, 120, 128):
        for causal in (False, True):
            x = torch.empty(1, 64, 2, dim, dtype=torch.bfloat16, device="cuda")
            lse = torch.empty(1, 2, 64, dtype=torch.float32, device="cuda")
            case = f"head dim {dim}, {'causal' if causal else 'all keys'}"
            try:
                _flash_attn_bwd(x, x, x, x, x, lse, dim**-0.5, causal)
                print(f"{case}: compiles")
            except Exception as error:
                line = next((x for x in str(error).splitlines() if "partition" in x), str(error))
                print(f"{case}: {type(error).__name__}: {line.strip()}")
                wrong += 1
sys.exit(wrong > 0)
