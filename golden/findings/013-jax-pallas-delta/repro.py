"""JAX's Pallas attention for GPUs: in which precision is its delta = rowsum(dO O)? Needs jax, no GPU.

Causal attention: the first row sees one key, O is that key's value, and dP - delta = dO v - dO O is 0. So is
the gradient of its q. Printed are the kernel's (in Pallas' interpreter), the same kernel's with a delta in
fp32, and, for all rows, how far both lie from jax.vjp of plain attention in fp32. Exit code 1: the first
row's gradient is off by more than fp32 rounds.
"""

import sys

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.gpu import attention


def plain(q, k, v):
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * 0.125
    scores = jnp.where(jnp.tril(jnp.ones(scores.shape[2:], bool)), scores, -jnp.inf)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v)


def kernel(q, k, v):
    blocks = attention.BlockSizes(*(64,) * 6)
    return attention.mha(q, k, v, None, sm_scale=0.125, causal=True, block_sizes=blocks, interpret=True)


def delta_in_fp32(out, do, lse, *_):
    return jnp.einsum("bqhd,bqhd->bhq", out.astype(jnp.float32), do.astype(jnp.float32)).astype(lse.dtype)


def gradient(function, *inputs):
    return jax.vjp(function, *inputs[:3])[1](inputs[3])[0].astype(jnp.float32)


print("jax", jax.__version__)
wrong = 0
for dtype in (jnp.bfloat16, jnp.float16):
    keys = jax.random.split(jax.random.key(0), 4)
    q, k, v, do = (jax.random.normal(key, (1, 64, 2, 64)).astype(dtype) for key in keys)
    exact = gradient(plain, *(x.astype(jnp.float32) for x in (q, k, v, do)))
    shipped, attention._preprocess_backward = attention._preprocess_backward, delta_in_fp32
    other = gradient(kernel, q, k, v, do)
    attention._preprocess_backward = shipped
    found = gradient(kernel, q, k, v, do)
    size = jnp.sqrt(jnp.mean(exact**2))
    for name, x in (("as shipped", found), ("delta in fp32", other)):
        first = float(jnp.abs(x[:, 0]).max())
        all_rows = float(jnp.sqrt(jnp.mean((x - exact) ** 2)) / size)
        print(f"{dtype.__name__}, {name}: largest dq of the first row {first:.2g} (0 is right); ", end="")
        print(f"rms error of all rows {all_rows:.2%}")
    wrong += float(jnp.abs(found[:, 0]).max()) > 1e-5
sys.exit(wrong > 0)
