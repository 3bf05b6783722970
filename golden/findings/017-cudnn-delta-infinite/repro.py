"""cuDNN's attention backward where delta = rowsum(dO * O) passes fp32's range. Needs torch, better a GPU.

Two keys with equal scores and equal values: O is that value, dP = delta, so dQ and dK are 0 exactly (the
float64 of this script). Only delta's partial sums pass 2^128. NaN or an infinity would say so; another number
does not. Without a GPU the gradient is computed as the recorded results were found to be made: a
reconstruction, in fp32, with 0 in the place of a delta of -inf. Exit code 1: a finite dQ that is wrong.
"""

import sys

import torch
from torch import Tensor

DIM, AT, PLACES = 24, 2.0**127, (12, 15)
GRADIENTS = [(-2.0, -1.0), (2.0, 1.0), (-1.0, -0.5)]  # dO at those places, where V is +AT and -AT


def delta_of(dout: Tensor, out: Tensor) -> Tensor:
    """Two products at a time, four such pairs one after the other, then neighbouring eights; all in fp32."""
    terms = torch.nn.functional.pad(dout.double() * out.double(), (0, -DIM % 64)).unflatten(-1, (-1, 4, 2))
    pairs = (terms[..., 0].float().double() + terms[..., 1]).float()
    sums = pairs[..., 0]
    for each in range(1, 4):
        sums = sums + pairs[..., each]
    while sums.shape[-1] > 1:
        sums = sums[..., 0::2] + sums[..., 1::2]
    return sums


def as_found(q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> Tensor:
    weights = (q.float() @ k.float().mT).softmax(-1)
    out = (weights @ v.float()).to(v.dtype)
    delta = delta_of(dout, out)
    delta = torch.where(delta == -torch.inf, 0.0, delta)
    dp = (dout.double() @ v.double().mT).float()
    return ((weights * (dp - delta)).to(k.dtype).float() @ k.float()).to(q.dtype)


def by_cudnn(q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> Tensor:
    leaves = [x.cuda().requires_grad_() for x in (q, k, v)]
    call = torch.ops.aten._scaled_dot_product_cudnn_attention
    out = call(*leaves, None, True, 0.0, False, False, scale=1.0)[0]
    return torch.autograd.grad(out, leaves[0], dout.cuda())[0].cpu()


def exact(q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> Tensor:
    q, k, v, dout = (x.double() for x in (q, k, v, dout))
    weights = (q @ k.mT).softmax(-1)
    delta = (dout * (weights @ v)).sum(-1, keepdim=True)
    return (weights * (dout @ v.mT - delta)) @ k


gpu = torch.cuda.is_available()
print(torch.__version__, torch.cuda.get_device_name() if gpu else "no GPU: reconstruction")
wrong = 0
for gradient in GRADIENTS:
    q, dout = (torch.zeros(2, 1, 1, DIM, dtype=torch.bfloat16) for _ in range(2))  # cuDNN takes no single row
    k, v = (torch.zeros(2, 1, 2, DIM, dtype=torch.bfloat16) for _ in range(2))
    k[..., 1, 23] = 1.0
    for place, value, upstream in zip(PLACES, (AT, -AT), gradient, strict=True):
        v[..., place], dout[..., place] = value, upstream
    found = (by_cudnn if gpu else as_found)(q, k, v, dout)[0, 0, 0, 23]
    right = exact(q, k, v, dout)[0, 0, 0, 23]
    wrong += bool(torch.isfinite(found)) and float(found) != float(right)
    print(
        f"dO {gradient} where V is +-2^127: dQ[..., 23] = {float(found).hex()}, {float(right).hex()} is right"
    )
sys.exit(wrong > 0)
