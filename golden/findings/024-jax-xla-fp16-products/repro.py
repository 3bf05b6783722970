"""jax.nn.dot_product_attention by XLA on a GPU, fp16, values of one column: are products rounded into fp16?

Needs torch and, to ask the kernel, jax with a GPU. Without one the output is computed as
xla/backends/gpu/transforms/dot_strength_reduction.cc writes it: products of fp16 numbers in fp16, their sum
in fp32. Exit code 1: an output is further off than one rounding of the exact sum.
"""

import os
import sys

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import torch

KEYS, HIDDEN = 10, -60.0
CASES = [  # scores and values of the last keys; those before them have the score -60 and the value 0
    ((-16.0, -8.0, 0.0), (0.1820068359375, -0.274169921875, 0.07171630859375)),
    ((0.0, 0.0, 0.0), (1.0009765625, 1.0029296875, -1.984375)),
    ((0.0, 0.0), (1.0009765625, -0.9990234375)),  # a weight of a half: no product is rounded
]


def jax_on_gpu():
    try:
        import jax
    except ImportError:
        return None
    return jax if jax.default_backend() == "gpu" else None


def by_xla(jax, scores: tuple[float, ...], values: tuple[float, ...]) -> float:
    jnp = jax.numpy
    before = KEYS - len(scores)
    k = jnp.array([HIDDEN] * before + list(scores), "float16").reshape(1, KEYS, 1, 1)
    v = jnp.array([0.0] * before + list(values), "float16").reshape(1, KEYS, 1, 1)
    q = jnp.ones((1, KEYS, 1, 1), "float16")
    run = jax.jit(lambda *x: jax.nn.dot_product_attention(*x, scale=1.0, implementation="xla"))
    return float(run(q, k, v)[0, -1, 0, 0])


jax = jax_on_gpu()
print(
    torch.__version__,
    f"jax {jax.__version__} {jax.devices()[0]}" if jax else "no GPU: as the source writes it",
)
wrong = 0
for scores, numbers in CASES:
    weights = torch.tensor(scores, dtype=torch.float64).softmax(-1).half()
    values = torch.tensor(numbers).half()
    exact = (weights.double() * values.double()).sum()
    found = by_xla(jax, scores, numbers) if jax else float((weights * values).float().sum().half())
    spacing = 2.0 ** (int(exact.abs().log2().floor()) - 10)
    off = abs(found - float(exact)) / spacing
    wrong += off > 0.501
    print(f"scores {scores}: {found:.7g}, exact {float(exact):.7g}: off by {off:.3f} of fp16's spacing")
sys.exit(wrong > 0)
