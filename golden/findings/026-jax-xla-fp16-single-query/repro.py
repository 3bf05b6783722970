"""jax.nn.dot_product_attention by XLA with 16-bit inputs, compiled and not. Needs JAX, better with CUDA.

Exit code 1: a call raises.
"""

import sys

import jax
import jax.numpy as jnp


def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    return jax.nn.dot_product_attention(q, k, v, implementation="xla")


def gradient(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    return jax.grad(lambda k: attend(q, k, v).sum())(k)


print("jax", jax.__version__, jax.devices()[0].device_kind)
wrong = 0
for name in ("float16", "bfloat16"):
    for queries, keys, dim in ((2, 16, 64), (1, 16, 64), (16, 1, 64), (16, 16, 1)):
        inputs = [jnp.ones((1, n, 1, dim), dtype=name) for n in (queries, keys, keys)]
        for what, call in (("forward", attend), ("backward", gradient)):
            for how, called in (("jax.jit", jax.jit(call)), ("as it comes", call)):
                case = f"{name}, {queries} queries, {keys} keys, head dim {dim}, {what}, {how}"
                try:
                    jax.block_until_ready(called(*inputs))
                    print(f"{case}: runs")
                except Exception as error:
                    print(f"{case}: {type(error).__name__}: {str(error).splitlines()[0][:100]}")
                    wrong += 1
sys.exit(wrong > 0)
