"""What the kernels declare about themselves, judged on problems that a wrong declaration fails on."""

import dataclasses

import pytest

import kernels
from flashcheck.checks import CHECKS
from flashcheck.checks.judged import Judged
from flashcheck.inputs.spec import ProblemSpec
from flashcheck.kernel import ForwardResult, as_kernel

NAMES = (
    "flash_attention",
    "flash_attention_e4m3",
    "flash_attention_e5m2",
    "flash_decode",
    "score_fp16",
    "score_bf16",
    "score_tf32",
    "score_e4m3",
    "score_e5m2",
)
KERNELS = {name: as_kernel(getattr(kernels, name), f"kernels:{name}") for name in NAMES}
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
    ("score_fp16", "bf16", {}),
    ("score_bf16", "fp32", {"alibi": True}),
    ("score_tf32", "fp32", {}),
    ("score_e4m3", "bf16", {"key_lengths": (70,)}),
    ("score_e4m3", "fp32", {"num_keys": 300}),
    ("score_e5m2", "fp16", {}),
]


@pytest.mark.parametrize(("name", "dtype", "options"), CASES, ids=str)
def test_judged(name, dtype, options, device):
    spec = dataclasses.replace(SPEC, dtype=dtype, **options)
    judged = Judged(KERNELS[name], spec.build(), device.type)
    for check in ("forward.bound", "forward.algorithm"):
        record = CHECKS[check].on(judged)
        assert not record.failed, record.message


FAULTS = [
    # What is declared, and what runs instead.
    ("score_e4m3", "bf16", {"score": "e5m2", "score_scales": "tensor"}),
    ("score_e4m3", "bf16", {"score": "e4m3", "hadamard": True}),
    ("score_fp16", "bf16", {"score": "bf16"}),
    ("score_tf32", "fp32", {"score": "bf16"}),
]


@pytest.mark.parametrize(("name", "dtype", "path"), FAULTS, ids=str)
def test_another_score_path_is_rejected(name, dtype, path, device):
    """The judge makes the declared conversion itself, so that a kernel with another one does not pass."""

    def forward(problem):
        return ForwardResult(*kernels.forward(problem.q, problem.k, problem.v, scale=problem.scale, **path))

    other = dataclasses.replace(KERNELS[name], forward=forward)
    judged = Judged(other, dataclasses.replace(SPEC, dtype=dtype).build(), device.type)
    assert any(CHECKS[check].on(judged).failed for check in ("forward.bound", "forward.algorithm"))
