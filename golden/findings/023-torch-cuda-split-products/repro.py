"""torch.matmul of 16-bit matrices on CUDA: are partial sums rounded into 16 bits? Needs torch; better a GPU.

Two terms in different parts of the sum: the first alone is rounded down, the sum of both is rounded up.
Without a GPU the sum is taken in parts of 8 terms that are rounded. Exit code 1: a product is further off
than one rounding of the exact one, in torch's default setting.
"""

import sys

import torch
from torch import Tensor

ROWS, KEYS, COLUMNS, SECOND, PART = 36, 31, 134, 15, 8
WEIGHTS = {torch.bfloat16: (0.99609375, 0.002716064453125), torch.float16: (0.99951171875, 0.0003662109375)}
VALUES = {torch.bfloat16: (0.50390625, 0.68359375), torch.float16: (0.50048828125, 0.625)}


def in_parts(weights: Tensor, values: Tensor) -> Tensor:
    parts = zip(weights.float().split(PART, -1), values.float().split(PART, -2), strict=True)
    return torch.stack([(a @ b).to(weights.dtype).float() for a, b in parts]).sum(0).to(weights.dtype)


def product(weights: Tensor, values: Tensor, allowed: bool) -> Tensor:
    if not torch.cuda.is_available():
        return (
            in_parts(weights, values) if allowed else (weights.double() @ values.double()).to(weights.dtype)
        )
    flags = torch.backends.cuda.matmul
    flags.allow_bf16_reduced_precision_reduction = allowed
    flags.allow_fp16_reduced_precision_reduction = allowed
    return torch.matmul(weights.cuda(), values.cuda()).cpu()


gpu = torch.cuda.is_available()
print(torch.__version__, torch.cuda.get_device_name() if gpu else "no GPU: in parts of 8 terms")
wrong = 0
for dtype, (first, second) in WEIGHTS.items():
    weights = torch.zeros(1, 1, ROWS, KEYS).to(dtype)
    values = torch.zeros(1, 1, KEYS, COLUMNS).to(dtype)
    weights[..., 0], weights[..., SECOND] = first, second
    values[..., 0, :], values[..., SECOND, :] = VALUES[dtype]
    exact = weights.double() @ values.double()
    for allowed in (True, False):
        found = product(weights, values, allowed)
        off = int((found != exact.to(dtype)).sum())
        wrong += allowed and off > 0
        setting = "default" if allowed else "not allowed"
        one, rounded = (float(x.flatten()[0]) for x in (found, exact.to(dtype)))
        print(
            f"{str(dtype)[6:]}, reduced precision {setting}: {one:.7g}, {rounded:.7g} is right; "
            f"{off} of {found.numel()} elements are off"
        )
sys.exit(wrong > 0)
