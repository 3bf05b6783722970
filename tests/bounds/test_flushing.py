"""Units that take subnormal operands for 0 and flush subnormal sums: THEORY.md section 2.3."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from flashcheck import kernel
from flashcheck.arithmetic import (
    ARITHMETICS,
    HOPPER,
    HOPPER_16BIT,
    HOPPER_FP8,
    IEEE,
    Accumulator,
    flash,
    flushing,
)
from flashcheck.bounds.alignment import operand, subnormal_error
from flashcheck.emulator.units import multiply_add
from flashcheck.flushing import NARROW, flushed_formats
from flashcheck.formats import BF16, E4M3, FP16, FP32, round_nearest
from tests.bounds.honest import margins, normal, problem

UNITS = {
    "fp16": (Accumulator(flush_subnormals=True), FP16, FP16),
    "bf16": (Accumulator(flush_subnormals=True), BF16, BF16),
    "fp32": (Accumulator(flush_subnormals=True), FP32, FP32),
    "e4m3 and bf16": (Accumulator(flush_subnormals=True), E4M3, BF16),
}


@pytest.mark.parametrize("low", ["left", "right", "both", "sums"])
@pytest.mark.parametrize(("unit", "left", "right"), UNITS.values(), ids=UNITS)
def test_sums_stay_within_gamma_the_flushed_operands_and_the_floor(unit, left, right, low):
    """And need them: without what is flushed some sum is outside."""
    sizes = {"left": (0, 1.0), "right": (1.0, 0), "both": (0, 0), "sums": (2.0**-60, 2.0**-68)}[low]
    if low == "sums" and left in (FP16, E4M3):
        pytest.skip("products of this format are normal fp32 numbers")
    if low == "both" and left in (BF16, FP32):
        pytest.skip("products of two subnormal numbers are 0 in fp32 anyway")

    def drawn(shape, size, fmt, seed):
        return round_nearest(normal(shape, seed) * (size or 4 * fmt.quantum), fmt)

    a, b = drawn((64, 30), sizes[0], left, 1), drawn((30, 48), sizes[1], right, 2)
    exact, size = a @ b, a.abs() @ b.abs()
    got = multiply_add(a.float(), b.float(), torch.zeros(64, 48), unit, left, other=right).double()
    error = (got - exact).abs()
    extra = subnormal_error(unit, operand(a.abs(), left), operand(b.abs(), right), torch.matmul)
    assert bool((error <= unit.gamma(30) * size + unit.floor(30) + extra).all())
    assert bool((error > Accumulator().gamma(30) * size + Accumulator().floor(30)).any())


KINDS = {
    "subnormal values": {"sizes": (1.0, 1.0, 0.0)},
    "subnormal keys": {"sizes": (1.0, 0.0, 1.0)},
    "subnormal queries": {"sizes": (0.0, 1.0, 1.0), "scale": 2.0**10},
    "large keys beside them": {"sizes": (0.0, 2.0**15, 1.0), "scale": 2.0**110},
    "subnormal gradients": {"gradient": 0.0},
    "everything": {"sizes": (0.0, 0.0, 0.0), "gradient": 0.0},
    "subnormal products": {"sizes": (1.0, 1.0, 2.0**-124), "gradient": 2.0**-124},
    "ordinary": {},
}


def _problem(fmt, *, gradient=1.0, sizes=(1.0, 1.0, 1.0), **options):
    sizes = tuple(size or 3 * fmt.quantum for size in sizes)
    made = problem(fmt.name, heads=(2, 1), lengths=(9, 40), seed=3, sizes=sizes, **options)
    return made.replaced(dout=(made.dout.double() * (gradient or 3 * fmt.quantum)).to(fmt.dtype))


MACHINES = {
    "ieee": flushing(IEEE, ("fp16", "bf16", "fp32")),
    "hopper": flushing(HOPPER, ("fp16", "bf16", "fp32")),
}


@pytest.mark.parametrize("machine", MACHINES.values(), ids=MACHINES)
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("preset", ["flash.fp16", "flash.bf16", "flash.fp32", "eager.bf16"])
def test_honest_kernels_on_units_that_flush_stay_inside(preset, kind, machine):
    arithmetic = ARITHMETICS[preset]
    worst = margins(_problem(arithmetic.input_format, **kind), arithmetic, machine)
    assert max(worst.values()) <= 1, worst


@pytest.mark.parametrize(
    ("kind", "tensor"),
    [
        ("subnormal values", "out"),
        ("subnormal values", "out.C"),
        ("subnormal products", "out"),
        ("subnormal products", "dv"),
        ("large keys beside them", "lse"),
        ("subnormal keys", "dq"),
        ("subnormal queries", "dk"),
        ("subnormal queries", "dk.C"),
        ("subnormal gradients", "dv"),
    ],
)
def test_the_terms_are_needed(kind, tensor):
    """A machine that keeps subnormal numbers cannot have produced what one that flushes them does."""
    arithmetic, flushes = ARITHMETICS["flash.bf16"], MACHINES["ieee"]
    made = _problem(BF16, **KINDS[kind])
    assert margins(made, arithmetic, flushes, (arithmetic, IEEE))[tensor] > 1


def test_only_the_named_formats_flush_and_the_rest_stays():
    both = flushing(HOPPER, ("bf16",))
    assert both.accumulator(BF16).flush_subnormals
    assert not both.accumulator(FP16).flush_subnormals
    assert (both.accumulator(BF16).block, both.accumulator(E4M3)) == (HOPPER_16BIT.block, HOPPER_FP8)
    assert flushing(IEEE, ()) is IEEE


def test_a_cpu_that_keeps_subnormal_numbers_is_judged_strictly(monkeypatch):
    """The model of the CPU follows the measurement, both ways."""
    cpu = torch.device("cpu")
    assert {n for n, unit in kernel.machine_for(cpu).accumulators.items() if unit.flush_subnormals} == set(
        flushed_formats()
    )
    monkeypatch.setattr(kernel, "flushed_formats", tuple)
    assert kernel.machine_for(cpu) is IEEE


def test_the_measurement_tells_instructions_apart():
    """Without the instructions for bf16, nothing is flushed on any processor."""
    code = "from flashcheck.flushing import flushed_formats; print(*flushed_formats())"
    environment = {**os.environ, "ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"}
    run = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert run.stdout.split() == []
    assert run.returncode == 0, run.stderr


@pytest.mark.parametrize("size", [1, 8, 16, 31, 64, 100, 200])
@pytest.mark.parametrize("fmt", NARROW, ids=str)
def test_products_of_other_sizes_flush_nothing_that_was_not_found(fmt, size):
    if fmt.name in flushed_formats():
        pytest.skip("found to flush here")
    a = torch.full((size, size), fmt.quantum, dtype=fmt.dtype)
    one = torch.eye(size, dtype=fmt.dtype)
    assert torch.equal(a @ one, a)
    assert torch.equal(one @ a, a)


FTZ_KINDS = {
    **KINDS,
    "tiny values": {"sizes": (1.0, 1.0, 2.0**-127)},
    "tiny gradients": {"gradient": 2.0**-127},
    "tiny keys and gradients": {"sizes": (1.0, 2.0**-60, 1.0), "gradient": 2.0**-66},
    "capped": {"softcap": 1.0, "gradient": 2.0**-125},
    "grouped, biased, with a sink": {
        "sizes": (1.0, 1.0, 2.0**-126),
        "gradient": 2.0**-124,
        "bias": 2.0**-127 * normal((1, 2, 9, 40), 7).float(),
        "sink": torch.tensor([2.0**-128, 1.0]),
    },
    "descales": {"sizes": (1.0, 1.0, 2.0**-127), "v_descale": 5.0, "gradient": 2.0**-125},
}
FTZ = {
    "tiled": {"block_keys": 16, "order": "ascending", "block_queries": 16},
    "operands": {"scale_placement": "operands", "scale_roundings": 2},
    "scores": {"scale_placement": "scores", "splits": 2},
    "scaled dS": {"scaled_grad_score_format": BF16, "grad_accumulator_format": BF16},
    "eager": {"normalise": "before_product", "scale_placement": "scores"},
}


@pytest.mark.parametrize("machine", [IEEE, HOPPER], ids=lambda m: m.name)
@pytest.mark.parametrize("changes", FTZ.values(), ids=FTZ)
@pytest.mark.parametrize("kind", FTZ_KINDS.values(), ids=FTZ_KINDS)
def test_honest_kernels_whose_other_operations_flush_stay_inside(kind, changes, machine):
    arithmetic = flash(BF16, flush_subnormals=True, **changes)
    worst = margins(_problem(BF16, **kind), arithmetic, machine)
    assert max(worst.values()) <= 1, worst


@pytest.mark.parametrize(
    ("kind", "tensor"),
    [
        ("tiny values", "out"),
        ("tiny values", "out.C"),
        ("tiny gradients", "dv"),
        ("tiny keys and gradients", "dq"),
        ("tiny keys and gradients", "dq.C"),
        ("descales", "out"),
    ],
)
def test_without_the_declaration_what_they_flush_is_outside(kind, tensor):
    """As FlashAttention-2's dQ and cuDNN's O are on a GPU (golden/findings/002)."""
    flushes, keeps = (flash(BF16, flush_subnormals=x, **FTZ["tiled"]) for x in (True, False))
    made = _problem(BF16, **FTZ_KINDS[kind])
    assert margins(made, flushes, HOPPER, (keeps, HOPPER))[tensor] > 1
    assert margins(made, keeps, HOPPER)[tensor] <= 1


def test_a_result_of_ordinary_size_is_judged_as_strictly():
    """The declaration allows some 2^-126, nothing that shows elsewhere."""
    made = _problem(BF16)
    for name in ("out", "dq", "dv"):
        one, other = (
            margins(made, flash(BF16), HOPPER, (flash(BF16, flush_subnormals=x), HOPPER))[name]
            for x in (False, True)
        )
        assert one == pytest.approx(other, rel=1e-12)
