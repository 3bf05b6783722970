"""cuDNN's attention backward in fp16 with 64 keys past a multiple of 128, and scores below about -11.

Needs torch; better an H100 or H200. Without one the gradient is computed with the keys padded by zeros to a
multiple of 128, scores of 0 that nobody hides, and dS rounded into fp16: a reconstruction. Exit code 1: dQ is
not finite although the exact one is.
"""

import sys

import torch
from torch import Tensor

DIM = 16
CASES = [  # (format, keys, queries, score)
    (torch.float16, 64, 64, -8.0),
    (torch.float16, 64, 64, -16.0),
    (torch.float16, 64, 64, -24.0),
    (torch.float16, 64, 1, -24.0),
    (torch.float16, 192, 64, -24.0),
    (torch.float16, 128, 64, -24.0),
    (torch.float16, 63, 64, -24.0),
    (torch.float16, 65, 64, -24.0),
    (torch.bfloat16, 64, 64, -24.0),
]


def exact(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """O in the format of v, LSE in fp32."""
    scores = q.double() @ k.double().mT
    return (scores.softmax(-1) @ v.double()).to(v.dtype), scores.logsumexp(-1, keepdim=True).float()


def as_found(q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dout: Tensor) -> Tensor:
    if k.shape[-2] % 128 == 64:  # whole tiles of 64, so that nothing is masked; tiles come in pairs
        k, v = (torch.nn.functional.pad(x, (0, 0, 0, 64)) for x in (k, v))
    weights = (q.float() @ k.float().mT - lse).exp()
    delta = (dout.float() * out.float()).sum(-1, keepdim=True)
    ds = (weights * (dout.float() @ v.float().mT - delta)).to(q.dtype)
    return ds.float() @ k.float()


def by_cudnn(q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dout: Tensor) -> Tensor:
    forward = torch.ops.aten._scaled_dot_product_cudnn_attention
    backward = torch.ops.aten._scaled_dot_product_cudnn_attention_backward
    q, k, v, dout = (x.cuda() for x in (q, k, v, dout))
    found = forward(q, k, v, None, True, 0.0, False, False, scale=1.0)
    own, own_lse = found[:2]
    stored = torch.empty_like(own).copy_(out), torch.empty_like(own_lse).copy_(lse.view(own_lse.shape))
    unused = (None, None, None, q.shape[-2], k.shape[-2], 0.0, False)  # bias, ends of packed sequences
    return backward(dout, q, k, v, *stored, found[6], found[7], *unused, scale=1.0)[0].cpu()


gpu = torch.cuda.is_available()
print(torch.__version__, torch.cuda.get_device_name() if gpu else "no GPU: reconstruction")
if gpu:
    print("cuDNN", torch.backends.cudnn.version())
wrong = 0
for dtype, keys, queries, score in CASES:
    torch.manual_seed(0)
    q, k = torch.zeros(2, 1, queries, DIM).to(dtype), torch.zeros(2, 1, keys, DIM).to(dtype)
    q[..., 0], k[..., 0] = 1.0, score
    v, dout = torch.randn(2, 1, keys, DIM).to(dtype), torch.randn(2, 1, queries, DIM).to(dtype)
    out, lse = exact(q, k, v)
    found = (by_cudnn if gpu else as_found)(q, k, v, out, lse, dout)
    bad = int((~torch.isfinite(found)).any(-1).sum())
    wrong += bad > 0
    print(
        f"{str(dtype)[6:]}, {queries} queries, {keys} keys, scores {score:g}, LSE {float(lse.min()):.2f}: "
        f"{bad} of {2 * queries} rows of dQ are not finite; 0 is right"
    )
sys.exit(wrong > 0)
