"""torch on the CPU in bf16: a NaN in one row reaches another row of the product. Needs torch, no more.

Row i of a @ b depends on row i of a alone. Exit code 1: another row of some product is NaN.
"""

import sys

import torch

print(torch.__version__, torch.backends.cpu.get_cpu_capability(), "AMX:", torch.cpu._is_amx_tile_supported())
wrong = 0
for terms in (32, 33, 48, 64, 65, 96):
    reached = {}
    for row in range(48):
        a, b = torch.ones(48, terms).bfloat16(), torch.ones(terms, 32).bfloat16()
        a[row] = torch.nan
        others = [r for r in (a @ b).isnan().any(1).nonzero().flatten().tolist() if r != row]
        if others:
            reached[row] = others
    wrong += bool(reached)
    first = next(iter(reached.items()), None)
    print(f"{terms} terms: a NaN in one row reaches another one for {len(reached)} of 48 rows; first {first}")
sys.exit(wrong > 0)
