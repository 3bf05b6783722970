"""The score path: in which format q, k, v and P enter the matrix unit, whatever q, k and v are stored in."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

STORAGE = {
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float32: "fp32",
    torch.float8_e4m3fn: "e4m3",
    torch.float8_e5m2: "e5m2",
}
"""dtypes of q, k and v, and the names of their formats."""

SCORES = ("fp16", "bf16", "tf32", "e4m3", "e5m2")
"""Formats that a caller may ask for; fp32 is what fp32 inputs get without asking."""

SCALES = ("tensor", "head", "rows")
"""What shares one scale: everything, one head of one batch, or a block of rows of it."""

OPERAND_DTYPE = {name: dtype for dtype, name in STORAGE.items()} | {"tf32": torch.float32}
FP8 = ("e4m3", "e5m2")

# Powers of two that put P = 1 near the top of the format; P is never above 1.
_PROBABILITY_SCALE = {"e4m3": 256.0, "e5m2": 32768.0}
_LARGEST_E4M3 = 448.0
_LARGEST_LIFTED = 2.0**23
"""Largest logit (log2 units) under which the softmax's maximum may bring P's scale along."""


@dataclass(frozen=True, slots=True)
class ScorePath:
    """Where the products round.

    Attributes:
        storage: format of q, k and v as given; operand: format in which they and P are multiplied.
        scales: what shares a scale, one of `SCALES`, or None: nothing is scaled.
        rows: rows of a block under scales "rows".
        hadamard: q and k are rotated before they are rounded.
        promote: partial products of one key tile are added to an fp32 sum, instead of to the matrix
            unit's own, which keeps 13 fraction bits of fp8 products on Hopper.
    """

    storage: str
    operand: str
    scales: str | None = None
    rows: int = 0
    hadamard: bool = False
    promote: bool = False

    @property
    def converts(self) -> bool:
        """Whether q, k and v must be converted before they are multiplied."""
        return self.operand != self.storage or self.hadamard

    @property
    def probability_scale(self) -> float:
        """P is multiplied by this before it is rounded."""
        return _PROBABILITY_SCALE.get(self.operand, 1.0)

    @property
    def subtract_first(self) -> bool:
        """Which form of the softmax step holds in P's range: see `kernels.softmax`. Not so under a `lift`."""
        return self.operand == "fp16" or self.operand in FP8

    def lift(self, head_dim: int, sigma: float | None) -> float:
        """log2 of P's scale where the softmax's maximum brings it along (`kernels.softmax`), else 0.

        That takes the fused form, whose common factor 2^delta must not carry P past the format: 2^(8 + delta)
        stays under e4m3's 448 where delta is at most 0.5, as it is while no logit passes `_LARGEST_LIFTED`.
        Unscaled e4m3 inputs warrant that by their own range; those of e5m2 and scaled ones do not.

        Args:
            sigma: the scores' factor to log2 units (`kernels.options.plain_sigma`).
        """
        if sigma is None or self.operand != "e4m3" or self.scales_mode != 0:
            return 0.0
        largest = _LARGEST_E4M3**2 * head_dim * abs(sigma)
        return math.log2(self.probability_scale) if largest <= _LARGEST_LIFTED else 0.0

    @property
    def output(self) -> torch.dtype:
        """dtype of the output and the gradients."""
        return output_dtype(OPERAND_DTYPE[self.storage])

    @property
    def gradient(self) -> str:
        """Format in which the products of the backward other than q . k take their operands."""
        if self.operand == "tf32":
            return "tf32"
        return "bf16" if self.storage in FP8 else self.storage

    @property
    def scales_mode(self) -> int:
        """For the kernels: 0 no scales, 1 one number a head, 2 one a row."""
        return 0 if self.scales is None and not self.hadamard else (2 if self.scales == "rows" else 1)

    def smallest_dim(self) -> int:
        """Fewest columns that an operand tile is padded to: fp8 products take 32 at least."""
        return 32 if self.operand in FP8 else 16


def output_dtype(dtype: torch.dtype) -> torch.dtype:
    """dtype of the output and the gradients, for inputs of ``dtype``: bf16 for fp8, else the same."""
    return torch.bfloat16 if STORAGE[dtype] in FP8 else dtype


def path_of(dtype: torch.dtype, score: str | None = None, score_scales: str | None = None) -> ScorePath:
    """The path of a call with these options and no others."""
    return parse_score_path(dtype, score, score_scales, None, False, True, False)


def plain_path(dtype: torch.dtype) -> ScorePath:
    """The path of a call that asks for none."""
    return path_of(dtype)


def parse_score_path(
    dtype: torch.dtype,
    score: str | None,
    score_scales: str | None,
    score_rows: int | None,
    hadamard: bool,
    promote: bool,
    allow_tf32: bool,
) -> ScorePath:
    """The path for inputs of ``dtype``; a ValueError names the argument, its value and what is legal."""
    storage = STORAGE[dtype]
    if score is not None and score not in SCORES:
        raise ValueError(f"score is {score!r}; it must be None or one of {', '.join(SCORES)}")
    if score is None:
        score = "tf32" if allow_tf32 and storage == "fp32" else storage
    if score == "tf32" and storage != "fp32":
        raise ValueError(f"score is 'tf32' with inputs of {storage}; it is for fp32 inputs")
    if storage in FP8 and score != storage:
        raise ValueError(
            f"score is {score!r} with inputs of {storage}; fp8 inputs are multiplied as they are"
        )
    if score_scales is not None and score_scales not in SCALES:
        raise ValueError(f"score_scales is {score_scales!r}; it must be None or one of {', '.join(SCALES)}")
    scaled = score in FP8 and score != storage
    if not scaled and (score_scales is not None or hadamard):
        name, value = ("hadamard", True) if hadamard else ("score_scales", score_scales)
        raise ValueError(f"{name} is {value!r}; it is for 16- and 32-bit inputs with score='e4m3' or 'e5m2'")
    scales = (score_scales or "head") if scaled else None
    if score_rows is not None and (scales != "rows" or score_rows < 1):
        raise ValueError(f"score_rows is {score_rows}; it must be at least 1, and needs score_scales='rows'")
    rows = (128 if score_rows is None else score_rows) if scales == "rows" else 0
    return ScorePath(storage, score, scales, rows, hadamard, promote and score in FP8)
