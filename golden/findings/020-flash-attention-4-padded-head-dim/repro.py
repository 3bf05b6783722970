"""FlashAttention-4's backward for Hopper where the head dim, padded to 16, is no multiple of 32.

Needs torch; better flash-attn-4 and an H100 or H200. Without one the gradients of float64 are moved as the
accumulator's two layouts move them: written with head dims padded to multiples of 16, read back with 32.
Exit code 1: rows of a gradient are wrong.
"""

import sys

import torch
from torch import Tensor

ROWS, COLUMNS = 64, 8
"""Rows of a warp group and columns of a matrix instruction: the accumulator's blocks lie one by one."""
CASES = [  # (head dim, queries, keys, heads, causal); each compiles its own kernels for 10 seconds
    (8, 65, 2, 1, False),
    (72, 200, 200, 1, False),
    (104, 200, 200, 1, True),
    (16, 65, 65, 2, False),
    (64, 200, 200, 2, False),
    (40, 200, 200, 2, False),
    (16, 200, 200, 1, False),
    (16, 64, 64, 1, False),
    (80, 200, 200, 2, False),
    (112, 200, 200, 2, True),
    (32, 200, 200, 2, False),
    (96, 200, 200, 2, False),
    (128, 200, 200, 2, True),
]
NAMES = ("dQ", "dK", "dV")
WRONG = 0.05
"""Of the largest element; roundings of bf16 make 0.005."""


def moved(x: Tensor) -> Tensor:
    """What is read back of (batch, length, heads, dim): blocks numbered by one width, read by another."""
    dim = x.shape[-1]
    if dim > 128:  # there both sides pad to 64
        return x
    written, read = (-(-dim // unit) * unit // COLUMNS for unit in (16, 32))
    groups = -(-x.shape[1] // 128) * 2
    x_ = x.transpose(1, 2)
    whole = torch.zeros(*x_.shape[:2], groups * ROWS, written * COLUMNS, dtype=x.dtype)
    whole[:, :, : x.shape[1], :dim] = x_
    blocks = (
        whole.unflatten(-1, (written, COLUMNS)).unflatten(2, (groups, ROWS)).transpose(3, 4).flatten(2, 3)
    )
    memory = torch.zeros(*blocks.shape[:2], groups * read, ROWS, COLUMNS, dtype=x.dtype)
    memory[:, :, : blocks.shape[2]] = blocks
    back = memory.unflatten(2, (groups, read)).transpose(3, 4).flatten(4, 5).flatten(2, 3)
    return back[:, :, : x.shape[1], :dim].transpose(1, 2)


def exact(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, causal: bool) -> list[Tensor]:
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    group = q.shape[2] // k.shape[2]
    q_, k_, v_ = (x.transpose(1, 2) for x in leaves)
    k_, v_ = (x.repeat_interleave(group, 1) for x in (k_, v_))
    scores = q_ @ k_.mT * q.shape[-1] ** -0.5
    if causal:
        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -torch.inf)
    return list(torch.autograd.grad((scores.softmax(-1) @ v_).transpose(1, 2), leaves, dout.double()))


def on_gpu(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, causal: bool) -> list[Tensor]:
    from flash_attn.cute import flash_attn_func

    leaves = [x.cuda().requires_grad_() for x in (q, k, v)]
    out, _ = flash_attn_func(*leaves, causal=causal)
    return [x.cpu() for x in torch.autograd.grad(out, leaves, dout.cuda())]


gpu = torch.cuda.is_available()
print(torch.__version__, torch.cuda.get_device_name() if gpu else "no GPU: as the source writes it")
wrong = 0
for dim, queries, keys, heads, causal in CASES:
    torch.manual_seed(0)
    shapes = [(1, queries, heads, dim), (1, keys, 1, dim), (1, keys, 1, dim), (1, queries, heads, dim)]
    tensors = [torch.randn(shape).bfloat16() for shape in shapes]
    right = exact(*tensors, causal)
    # One head per key/value head: dK and dV are stored from registers, without the accumulator.
    expected = [moved(x) if name == "dQ" or heads > 1 else x for name, x in zip(NAMES, right, strict=True)]
    found = on_gpu(*tensors, causal) if gpu else expected
    said = []
    for name, got, want, as_written in zip(NAMES, found, right, expected, strict=True):
        error, largest = (got.double() - want).abs(), want.abs().max()
        rows = (error > WRONG * largest).any(-1).any(0).any(-1).nonzero().flatten().tolist()
        wrong += bool(rows)
        text = f"{name} off by {float(error.max() / largest):.4f} of the largest"
        text += f", from row {rows[0]} on" if rows else ""
        text += (
            "" if float((got.double() - as_written).abs().max() / largest) < WRONG else ", not as the source"
        )
        said.append(text)
    kind = f"head dim {dim}, {queries} x {keys}, {heads} to 1 heads{', causal' if causal else ''}"
    print(f"{kind}: {'; '.join(said)}", flush=True)
sys.exit(wrong > 0)
