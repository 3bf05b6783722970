"""What a probe found: plain records, written to JSON and read back."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

FORMAT_VERSION: Literal[1] = 1
Platform = Literal["triton", "torch"]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, ser_json_inf_nan="strings")


class DeviceFinding(_Part):
    """The device, and all that may change its arithmetic.

    Attributes:
        kind: cpu or cuda. name: the product's name. capability: compute capability, "" on a CPU.
        triton: ``compiled`` or ``interpreted``.
        interpreter: a digest of the interpreter's code as it runs (repairs change it), "" where compiled.
        versions: of flashcheck, torch, triton, python, cuda.
    """

    kind: str
    name: str
    capability: str
    triton: str
    interpreter: str
    versions: dict[str, str]


class ProductFinding(_Part):
    """One way to multiply matrices. Bits count fraction bits below the largest addend.

    Attributes:
        unit: how it was called, such as ``tl.dot 64 rows``. operands: their format.
        operand_bits: significand bits of an operand that reach the product.
        operand_rounding: how longer operands are shortened ("exact" where none are).
        sum_bits: bits that an addend may lie below the accumulator and still be stored (p - 1).
        rounding: of the stored sum.
        kept_bits: bits kept while a step adds: the smaller of between products and with the accumulator.
        kept_products, kept_accumulator: the two apart.
        block: addends per step; 1: every addition is rounded.
        subnormal_operands, subnormal_sums: kept or flushed.
        nan: NaN operands reach the result.
        bits_agree, bits_tested: random sums that the model above reproduces bit for bit; 0 of 0 where the
            order of the additions is not known.
        largest_error: of those sums, in units of the model's bound: above 1 the model does not hold.
        wrong: a product or sum that is no rounding of the exact one, or "".
        failed: why there is no finding, or "".
    """

    unit: str
    operands: str
    platform: Platform
    operand_bits: int | None = None
    operand_rounding: str = "exact"
    sum_bits: int | None = None
    rounding: str = "unknown"
    kept_bits: int | None = None
    kept_products: int | None = None
    kept_accumulator: int | None = None
    block: int | None = None
    subnormal_operands: str = "unknown"
    subnormal_sums: str = "unknown"
    nan: bool | None = None
    bits_agree: int = 0
    bits_tested: int = 0
    largest_error: float | None = None
    wrong: str = ""
    failed: str = ""


class CastFinding(_Part):
    """A conversion from fp32.

    Attributes:
        target: the format. tested: inputs tried; exhaustive: all of them.
        wrong: finite inputs whose result is not the nearest value (ties to even).
        rounding: nearest even, toward zero, or other.
        example: the first wrong one, "" where none is.
        overflow: saturates, infinity, NaN or other. infinity: what it becomes. nan_kept: NaN stays NaN.
    """

    target: str
    platform: Platform
    tested: int = 0
    exhaustive: bool = False
    wrong: int = 0
    rounding: str = "unknown"
    example: str = ""
    overflow: str = "unknown"
    infinity: str = "unknown"
    nan_kept: bool | None = None
    failed: str = ""


class FunctionFinding(_Part):
    """A function of fp32 arguments against float64.

    Attributes:
        tested: arguments; exhaustive: all 2^32 of them.
        relative: largest relative error where exact and computed results are normal numbers, in units of
            2^-24; at: the argument, hex. ulps: largest error in spacings of the exact result.
        bias: mean of the signed relative errors, in units of 2^-24 (negative: biased low).
        absolute: largest absolute error where |exact| <= 1 (logarithms, tanh), in units of 2^-24.
        relative_above_one: largest relative error where |exact| > 1, in units of 2^-24.
        flush: largest |exact| that came out as zero although it is not; 0 where none did.
        special: what NaN, infinities, zeros (and 1 for logarithms) gave, where it is not the exact value.
    """

    function: str
    platform: Platform
    tested: int = 0
    exhaustive: bool = False
    relative: float = 0.0
    at: str = ""
    ulps: float = 0.0
    bias: float = 0.0
    absolute: float = 0.0
    relative_above_one: float = 0.0
    flush: float = 0.0
    special: dict[str, str] = {}
    failed: str = ""


class AdditionFinding(_Part):
    """fp32 arithmetic outside the matrix unit.

    Attributes:
        addition: rounding of a + b. subnormal_sums: kept or flushed.
        fused: ``a * b + c`` is rounded once as written; explicit: ``fma(a, b, c)`` is.
    """

    platform: Platform
    addition: str = "unknown"
    subnormal_sums: str = "unknown"
    fused: bool | None = None
    explicit: bool | None = None
    failed: str = ""


class ProbeReport(_Part):
    """Everything one probe found. ``machines``: the Machine that it implies, by platform, as plain data."""

    format_version: Literal[1] = FORMAT_VERSION
    date: str
    seconds: float
    quick: bool
    device: DeviceFinding
    products: list[ProductFinding]
    additions: list[AdditionFinding]
    casts: list[CastFinding]
    functions: list[FunctionFinding]
    machines: dict[Platform, dict[str, Any]] = {}
    interrupted: bool = False

    def failures(self) -> list[str]:
        """One line for each probe that could not run."""
        out = [f"{p.unit} {p.operands}: {p.failed}" for p in self.products if p.failed]
        out += [f"{a.platform} addition: {a.failed}" for a in self.additions if a.failed]
        out += [f"{c.platform} cast to {c.target}: {c.failed}" for c in self.casts if c.failed]
        return out + [f"{f.platform} {f.function}: {f.failed}" for f in self.functions if f.failed]
