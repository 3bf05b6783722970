"""Problems made for reading a kernel: the options of the judged problem, values that show what it did.

Their scores are all alike, so that every key a row sees has about the same weight and no leak or loss
can hide below a rounding.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from flashcheck.formats import Format
from flashcheck.problem import Problem


def level(problem: Problem) -> Problem:
    """The same masks and options over q = 1 and one-hot keys: every visible key scores the same.

    Key j is one-hot in column j mod dim, at a height that keeps |score| <= 1, so a head-dim column that
    the product leaves out lowers the scores of its keys. Bias, ALiBi slopes and sink keep their shapes
    and become 0.
    """
    q = torch.ones_like(problem.q)
    k = one_hot(problem.k, torch.arange(problem.num_keys), key_height(problem))
    zeroed = {
        name: torch.zeros_like(x)
        for name in ("bias", "alibi_slopes", "sink")
        if (x := getattr(problem, name)) is not None
    }
    return problem.replaced(q=q, k=k, v=torch.zeros_like(problem.v), dout=None, dlse=None, **zeroed)


def key_height(problem: Problem) -> float:
    """The largest power of two, up to 1 / |scale| and inside the format, for a one-hot key."""
    scale = abs(problem.effective_scale)
    if scale == 0:
        return 1.0
    exponent = math.floor(-math.log2(scale))
    return 2.0 ** max(min(exponent, _top(problem.format)), problem.format.min_exponent)


def value_height(problem: Problem) -> float:
    """A large power of two: hidden values multiplied by any weight that is not 0 then show."""
    return 2.0 ** min(14, _top(problem.format))


def _top(fmt: Format) -> int:
    return min(math.floor(math.log2(fmt.max_finite)) - 1, 40)


def one_hot(like: Tensor, rows: Tensor, height: float, first: int = 0) -> Tensor:
    """``height`` in column (row - first) mod dim of the given rows, else 0; shape and dtype of ``like``."""
    out = torch.zeros(like.shape, dtype=torch.float64)
    if len(rows):
        out[:, :, rows, (rows - first) % like.shape[-1]] = height
    return out.to(like.dtype)


def chunks(length: int, width: int) -> list[Tensor]:
    """0..length-1 in consecutive parts of at most ``width``."""
    return [torch.arange(start, min(start + width, length)) for start in range(0, length, width)]


def normal(like: Tensor, seed: int) -> Tensor:
    """N(0, 1) in shape and dtype of ``like``."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(like.shape, generator=generator, dtype=torch.float64).to(like.dtype)
