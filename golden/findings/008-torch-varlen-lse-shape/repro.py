"""``torch.nn.attention.varlen.varlen_attn``: the shape of the log-sum-exp. Needs torch alone, no GPU.

Its documentation says (T_q, H_q). Meta tensors ask the operator for shapes without running it. Exit code 1:
another shape.
"""

import sys

import torch
from torch.nn.attention.varlen import AuxRequest, varlen_attn

print("torch", torch.__version__)
total, heads, dim = 24, 3, 64
q = torch.empty(total, heads, dim, dtype=torch.float16, device="meta")
ends = torch.empty(3, dtype=torch.int32, device="meta")
out, lse = varlen_attn(q, q, q, ends, ends, 12, 12, return_aux=AuxRequest(lse=True))
print(f"expected {(total, heads)}, got {tuple(lse.shape)}")
sys.exit(tuple(lse.shape) != (total, heads))
