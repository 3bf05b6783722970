"""cuDNN's attention backward where delta = rowsum(dO * O) passes fp32's range. Needs torch, better a GPU.

Two keys with equal scores and equal values: O is that value, dP = delta, so dQ and dK are 0 exactly (the
float64 of this script). Only delta's partial sums pass 2^128. NaN or an infinity would say so; another number
does not. The backward is asked at the exact O and LSE, and at those of cuDNN's own forward, whose sum of
values passes the range before it is divided where they are 2^127. Without a GPU the gradient is computed as
the recorded results were found to be made: a reconstruction, in fp32, with 0 in the place of a delta of -inf.
Exit code 1: a finite dQ that is wrong.
"""

import math
import sys

import torch
from torch import Tensor

DIM, PLACES = 24, (12, 15)
CASES = [(127, -1.0, 1), (127, 1.0, 1), (127, -1.0, 0), (100, -1.0, 28)]
"""V is 2^first and -2^first at those places, dO the sign times 2^last and 2^(last - 1)."""


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


def as_found(q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dout: Tensor) -> Tensor:
    weights = (q.float() @ k.float().mT - lse).exp()
    delta = delta_of(dout, out)
    delta = torch.where(delta == -torch.inf, 0.0, delta)
    dp = (dout.double() @ v.double().mT).float()
    return ((weights * (dp - delta)).to(k.dtype).float() @ k.float()).to(q.dtype)


def own_forward(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """cuDNN's O and LSE, and what it kept of its random numbers, of which it drew none."""
    found = torch.ops.aten._scaled_dot_product_cudnn_attention(
        q.cuda(), k.cuda(), v.cuda(), None, True, 0.0, False, False, scale=1.0
    )
    return found[0], found[1], found[6], found[7]


def by_cudnn(q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dout: Tensor) -> Tensor:
    """dQ at the given O and LSE, which are laid out as the forward makes them."""
    own, own_lse, *random = own_forward(q, k, v)
    stored = torch.empty_like(own).copy_(out), torch.empty_like(own_lse).copy_(lse.view(own_lse.shape))
    unused = (None, None, None, q.shape[-2], k.shape[-2], 0.0, False)  # bias, ends of packed sequences
    backward = torch.ops.aten._scaled_dot_product_cudnn_attention_backward
    dq, _, _ = backward(dout.cuda(), q.cuda(), k.cuda(), v.cuda(), *stored, *random, *unused, scale=1.0)
    return dq.cpu()


def exact(q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """O in the format of v, LSE in fp32, dQ."""
    q, k, wide, dout = (x.double() for x in (q, k, v, dout))
    scores = q @ k.mT
    out = scores.softmax(-1) @ wide
    delta = (dout * out).sum(-1, keepdim=True)
    dq = (scores.softmax(-1) * (dout @ wide.mT - delta)) @ k
    return out.to(v.dtype), scores.logsumexp(-1, keepdim=True).float(), dq


gpu = torch.cuda.is_available()
print(torch.__version__, torch.cuda.get_device_name() if gpu else "no GPU: reconstruction")
if gpu:
    print("cuDNN", torch.backends.cudnn.version())
wrong = 0
for power, sign, upper in CASES:
    q, dout = (torch.zeros(2, 1, 1, DIM, dtype=torch.bfloat16) for _ in range(2))  # cuDNN takes no single row
    k, v = (torch.zeros(2, 1, 2, DIM, dtype=torch.bfloat16) for _ in range(2))
    k[..., 1, 23] = 1.0
    for number, place in enumerate(PLACES):
        v[..., place] = (-1.0) ** number * 2.0**power
        dout[..., place] = sign * 2.0 ** (upper - number)
    out, lse, dq = exact(q, k, v, dout)
    stored = {"exact": (out, lse)}
    if gpu:
        stored["cuDNN's"] = tuple(x.cpu() for x in own_forward(q, k, v)[:2])
    for whose, (given, given_lse) in stored.items():
        found = float((by_cudnn if gpu else as_found)(q, k, v, given, given_lse, dout)[0, 0, 0, 23])
        right = float(dq[0, 0, 0, 23])
        wrong += math.isfinite(found) and found != right
        case = f"V +-2^{power}, dO {sign:+g} times 2^{upper} and 2^{upper - 1}, {whose} O"
        first = float(given[0, 0, 0, PLACES[0]])
        print(f"{case} ({first:.3g}): dQ[..., 23] = {found.hex()}, {right.hex()} is right")
sys.exit(wrong > 0)
