"""Calls long enough for the forward in Gluon, through the checks, as users make them; for on_gpu.py.

The checker's own plans hold few problems as long as that. What these calls declare, 64 or 128 keys a tile, is
judged with them.
"""

from __future__ import annotations

import dataclasses

import kernels
from flashcheck.checks import CHECKS
from flashcheck.checks.judged import Judged
from flashcheck.inputs.spec import ProblemSpec
from flashcheck.kernel import as_kernel

SPEC = ProblemSpec(
    batch=1, num_heads=2, num_kv_heads=1, num_queries=150, num_keys=1100, head_dim=128, value_dim=128
)
# (kernel, dtype, head dim, queries, keys, options); the inputs' family follows.
CASES = [
    ("flash_attention", "bf16", 128, 150, 1100, {"family": "normal"}),
    ("flash_attention", "bf16", 96, 1, 1024, {"family": "uniform"}),
    ("flash_attention", "bf16", 72, 64, 1300, {"family": "outliers", "causal": "bottom_right"}),
    ("flash_attention", "bf16", 128, 300, 1100, {"family": "normal_large", "causal": "top_left"}),
    ("flash_attention", "bf16", 128, 129, 1025, {"family": "huge_logits", "causal": "bottom_right"}),
    ("flash_attention", "fp16", 128, 150, 1100, {"family": "normal"}),
    ("flash_attention", "fp16", 120, 200, 1200, {"family": "increasing", "causal": "bottom_right"}),
    ("flash_attention", "fp16", 128, 70, 1090, {"family": "very_negative"}),
    # Three and four groups of warps, 128 and 64 keys a tile.
    ("flash_attention", "bf16", 64, 200, 2100, {"family": "normal"}),
    ("flash_attention", "fp16", 56, 450, 2060, {"family": "outliers", "causal": "bottom_right"}),
    ("flash_attention", "bf16", 64, 300, 1100, {"family": "normal_large", "causal": "top_left"}),
    ("flash_attention", "fp16", 64, 150, 1030, {"family": "increasing"}),
    # The same lengths where the forward in Gluon is not for them.
    ("flash_attention", "bf16", 128, 70, 1100, {"family": "normal", "scale": -0.1}),
    ("flash_attention", "bf16", 128, 150, 1100, {"family": "normal", "window": (300, 20)}),
    ("flash_attention_e4m3", "e4m3", 128, 150, 1100, {"family": "normal"}),
    ("flash_attention_e4m3", "e4m3", 96, 130, 1030, {"family": "outliers", "causal": "bottom_right"}),
    ("flash_attention_e5m2", "e5m2", 128, 70, 1100, {"family": "normal"}),
    ("score_e4m3", "bf16", 128, 150, 1100, {"family": "normal", "causal": "top_left"}),
]
# Segments long enough on average for the forward in Gluon; head dims that the backward holds in two parts,
# dK and dV together or apart.
_LONG, _SHORTER = ((5, 1500), (70, 2600)), ((100, 130), (50, 130))
CASES += [
    ("flash_attention", "bf16", 128, 75, 4100, {"segments": _LONG, "causal": "bottom_right"}),
    ("flash_attention", "fp16", 96, 75, 4100, {"segments": _LONG}),
    ("flash_attention", "bf16", 96, 200, 300, {"causal": "top_left"}),
    ("flash_attention", "fp16", 192, 200, 300, {"family": "outliers"}),
    ("flash_attention", "bf16", 192, 200, 300, {"causal": "bottom_right"}),
    ("flash_attention", "bf16", 136, 150, 260, {"segments": _SHORTER, "causal": "bottom_right"}),
]
SHORT = ("flash_attention", "bf16", 72, 5, 40, {"family": "normal", "causal": "top_left"})
# Not: what is judged over many problems, what starts processes, and most of the backward, whose kernels are
# the same at any length.
CHOSEN = [
    name
    for name, check in CHECKS.items()
    if not check.grouped
    and name not in ("state.fresh_process", "option.illegal", "influence.backward", "isolation.backward")
]


def rejections(case, device):
    """What the checks say against a call, as text."""
    name, dtype, d, queries, keys, options = case
    size = {"num_queries": queries, "num_keys": keys, "head_dim": d, "value_dim": d}
    spec = dataclasses.replace(SPEC, dtype=dtype, seed=1, **{**size, **options})
    kernel = as_kernel(getattr(kernels, name), f"kernels:{name}")
    judged = Judged(kernel, spec.build(), device.type)
    records = [CHECKS[check].on(judged) for check in CHOSEN]
    return [f"{record.check}: {record.message}"[:300] for record in records if record.failed]
