"""What the kernels declare about themselves, judged on problems that a wrong declaration fails on."""

import dataclasses

import pytest

import kernels
from flashcheck.checks import CHECKS
from flashcheck.checks.judged import Judged
from flashcheck.inputs.spec import ProblemSpec
from flashcheck.kernel import as_kernel

KERNELS = {
    name: as_kernel(getattr(kernels, name), f"kernels:{name}")
    for name in ("flash_attention", "flash_attention_e4m3", "flash_attention_e5m2", "flash_decode")
}
SPEC = ProblemSpec(
    dtype="bf16",
    batch=1,
    num_heads=2,
    num_kv_heads=2,
    num_queries=17,
    num_keys=100,
    head_dim=24,
    value_dim=24,
    scale=1.0,
    family="normal",
    seed=1,
)
CASES = [
    ("flash_attention", "bf16", {}),
    # Segments that are no multiple of a tile: their tiles start where they start.
    ("flash_attention", "bf16", {"segments": ((5, 50), (0, 0), (12, 50))}),
    ("flash_attention", "fp16", {"segments": ((17, 100),)}),
    ("flash_attention_e4m3", "e4m3", {"causal": "bottom_right"}),
    ("flash_attention_e4m3", "e4m3", {"segments": ((5, 50), (12, 50))}),
    ("flash_attention_e5m2", "e5m2", {"softcap": 15.0}),
    ("flash_decode", "bf16", {"key_lengths": (70,)}),
    ("flash_decode", "fp16", {"sink": True}),
]


@pytest.mark.parametrize(("name", "dtype", "options"), CASES, ids=str)
def test_judged(name, dtype, options, device):
    spec = dataclasses.replace(SPEC, dtype=dtype, **options)
    judged = Judged(KERNELS[name], spec.build(), device.type)
    for check in ("forward.bound", "forward.algorithm"):
        record = CHECKS[check].on(judged)
        assert not record.failed, record.message
