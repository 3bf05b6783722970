"""The probe finds what a unit does, for units whose arithmetic is known."""

import pytest

from flashcheck.arithmetic import HOPPER_16BIT, HOPPER_FP8, IEEE_FP32, Accumulator
from flashcheck.formats import BF16, E4M3, E5M2, FP16, FP32
from flashcheck.probe.products import measure_products, model_of
from tests.probe.emulated import CPU, emulated

RZ = "toward_zero"
UNITS = {
    "hopper 16 bit": (FP16, HOPPER_16BIT),
    "hopper 16 bit, bf16": (BF16, HOPPER_16BIT),
    "hopper fp8": (E4M3, HOPPER_FP8),
    "hopper fp8, e5m2": (E5M2, HOPPER_FP8),
    "ampere": (BF16, Accumulator(8, 24, 24, RZ)),
    "volta": (FP16, Accumulator(4, 23, 24, RZ)),
    "blackwell fp8": (E5M2, Accumulator(32, 25, 24, RZ)),
    "ada fp8": (E4M3, Accumulator(16, 13, 14, RZ)),
    "nearest after each block": (BF16, Accumulator(16, 25, 24, "nearest")),
    "14 bits, nearest": (BF16, Accumulator(16, 15, 14, "nearest")),
    "ieee": (BF16, IEEE_FP32),
}


@pytest.mark.parametrize("name", UNITS)
def test_a_unit_is_recovered_from_its_sums(name):
    operands, accumulator = UNITS[name]
    unit = emulated(operands, accumulator, inner=128 if operands.precision <= 4 else 64)
    found = measure_products(unit, CPU)
    assert not found.failed
    assert not found.wrong
    assert model_of(found) == accumulator
    assert found.operand_bits == operands.precision
    assert (found.subnormal_operands, found.subnormal_sums, found.nan) == ("kept", "kept", True)
    assert found.bits_agree == found.bits_tested  # the model reproduces the unit, bit for bit
    assert bool(found.bits_tested) == (accumulator.block > 1)


@pytest.mark.parametrize("field", ["fraction_bits", "block", "precision", "rounding"])
def test_two_units_that_differ_in_one_field_are_told_apart(field):
    changes = {"fraction_bits": 24, "block": 8, "precision": 23, "rounding": "nearest"}
    plain = HOPPER_16BIT
    other = Accumulator(
        **{n: getattr(plain, n) for n in ("block", "fraction_bits", "precision", "rounding")}
        | {field: changes[field]}
    )
    found = model_of(measure_products(emulated(BF16, other), CPU))
    assert getattr(found, field) == changes[field]


def test_flushed_subnormals_are_seen():
    found = measure_products(emulated(FP32, Accumulator(flush_subnormals=True)), CPU)
    assert (found.subnormal_operands, found.subnormal_sums) == ("flushed", "flushed")


@pytest.mark.parametrize(("truncates", "word"), [(True, "toward zero"), (False, "nearest")])
def test_tf32_operands_are_seen(truncates, word):
    unit = emulated(FP32, Accumulator(8, 25, 24, RZ), precision="tf32", truncates_operands=truncates)
    found = measure_products(unit, CPU)
    assert (found.operand_bits, found.operand_rounding) == (11, word)
    assert found.bits_agree == found.bits_tested > 0


def test_a_unit_that_multiplies_something_else_is_wrong():
    class Codes(type(emulated(BF16, IEEE_FP32))):
        def multiply_add(self, a, b, c, device):
            return super().multiply_add(a * 3, b, c, device)

    found = measure_products(Codes("codes", "triton", BF16), CPU)
    assert "gives" in found.wrong
    assert model_of(found) is None


def test_a_unit_that_errs_more_than_its_rounding_is_wrong():
    """Crafted sums come out right, random ones do not: what the interpreter did with e5m2."""

    class Sloppy(type(emulated(BF16, IEEE_FP32))):
        def multiply_add(self, a, b, c, device):
            out = super().multiply_add(a, b, c, device)
            return out * (1 + 2.0**-12) if (b != 0).double().mean() > 0.9 else out

    assert "random sums" in measure_products(Sloppy("sloppy", "triton", BF16), CPU).wrong


def test_a_unit_that_raises_is_a_row():
    class Broken(type(emulated(BF16, IEEE_FP32))):
        def multiply_add(self, *_):
            raise RuntimeError("no such instruction")

    found = measure_products(Broken("broken", "triton", BF16), CPU)
    assert found.failed == "RuntimeError: no such instruction"
