"""What a kernel declares about its rounding (Arithmetic), and how the hardware rounds (Machine).

A bound is proved for a pair (Arithmetic, Machine): the first says *where* values are rounded and into
which formats, the second *how* sums, exponentials, logarithms and quotients come out. THEORY.md
section 2 defines every symbol.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, fields, replace
from typing import Literal

from flashcheck.errors import ArgumentError, UnknownNameError
from flashcheck.formats import BF16, E4M3, E5M2, FP16, FP32, Format, format_named, is_power_of_two

InputScale = Literal["none", "tensor"]
Order = Literal["ascending", "descending", "unknown"]
RowSum = Literal["unrounded", "rounded"]
ScalePlacement = Literal["exponent_fma", "exponent_subtract_first", "scores", "operands"]
ProbabilityScalePlacement = Literal["product", "exponent"]
Normalise = Literal["after_product", "before_product"]
SinkPosition = Literal["first", "last"]
GradScoreProbability = Literal["unrounded", "rounded"]
BackwardProbability = Literal["as_normalised", "recomputed", "kept"]
Rounding = Literal["nearest", "toward_zero"]

_CHOICES: dict[str, tuple[str, ...]] = {
    "input_scale": ("none", "tensor"),
    "order": ("ascending", "descending", "unknown"),
    "row_sum": ("unrounded", "rounded"),
    "scale_placement": ("exponent_fma", "exponent_subtract_first", "scores", "operands"),
    "probability_scale_placement": ("product", "exponent"),
    "normalise": ("after_product", "before_product"),
    "sink_position": ("first", "last"),
    "grad_score_probability": ("unrounded", "rounded"),
    "backward_probability": ("as_normalised", "recomputed", "kept"),
}


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """Where a kernel rounds, as its author declares it.

    Attributes:
        input_format: storage of q, k, v; where it is not their own, they are converted to it first, by one
            rounding, and the kernel is judged on the converted values (``operands.as_multiplied``).
        input_scale: "tensor": before that conversion each of q, k, v is scaled by a power of two.
        output_format: storage of the output (and of the gradients).
        probability_format: P enters the second product in this format.
        product_format: operands of both products are converted to this format first (None: the
            input format for Q K^T, ``probability_format`` for P V).
        score_format: the score tile is rounded into this format (None: it stays fp32).
        score_scale: scores are multiplied by this power of two before that rounding.
        probability_scale: P is multiplied by this before it is rounded, and the result divided.
        probability_scale_placement: of the forward. ``product``: the weights are multiplied by it;
            ``exponent``: the maximum that is subtracted is smaller by its log2, fma(S, scale*log2e, -(m' -
            log2 c)), so that weights and row sum are c times as large (``exponent_fma``, c a power of two).
        grad_score_format: dS enters the products for dQ and dK in this format (None: as P).
        lse_format: storage of the log-sum-exp.
        block_keys: keys per tile; None where unknown (bounds then hold for every tiling).
        order: the order in which key tiles are visited.
        row_sum: the denominator sums P before or after P is rounded.
        normalise: the division by the row sum comes after P V (flash) or before it (eager).
        scale_placement: where ``scale`` is applied. ``exponent_fma``: fma(S, scale*log2e, -m');
            ``exponent_subtract_first``: (S - m) * scale*log2e; ``scores``: S * scale, rounded, then
            minus the maximum; ``operands``: q and k are each multiplied by sqrt(scale) and rounded
            to fp32 (to ``product_format`` where that is narrower) before the product.
        scale_roundings: roundings (fp32) in the constant that multiplies the scores.
        score_roundings: further fp32 roundings of each finished score, such as a change of base of its own.
        scaled_score_format: the finished score (scaled, biased) is rounded into this format (None: not).
        exp_error: relative error of the kernel's own exponential; None: the machine's.
        exp_flush: results of the kernel's own exponential below this may be zero; None: the machine's.
        backward_exp_error, backward_exp_flush: the same of the exponential of the backward; None: as
            the forward's.
        rescale_threshold: log2 growth of the running maximum below which rescaling is skipped.
        sink_position: a sink joins the running maximum and sum before or after the key tiles.
        splits: partial results that are merged at the end (split keys); 1: none.
        atomic_dq: dQ is summed by atomics, so its order differs from run to run.
        grad_accumulator_format: dQ is rounded into this format after every key tile, dK and dV after
            every query tile (None: they are summed in fp32 and rounded once).
        grad_score_probability: dS = P (dP - delta) takes P before or after P is rounded.
        block_queries: queries per tile in the backward; None where unknown.
        delta_format: the products of delta = rowsum(dO O), and then their sum, are rounded into this format
            (None: fp32).
        grad_probability_format: dP is rounded into this format (None: it stays fp32).
        scaled_grad_score_format: dS, in its own format, is multiplied by the scale and rounded into this
            format before the products for dQ and dK (None: the scale multiplies their sums).
        backward_probability: ``recomputed``: the backward takes P = exp(s - L) of the stored log-sum-exp and
            delta of the stored output; ``kept``: it takes the forward's own P, and delta = rowsum(P dP);
            ``as_normalised``: recomputed where P is normalised after the product, kept where before it.
        group_grad_format: under grouped heads, the dK and dV of each query head are rounded into this
            format before they are summed over the group (None: the sum is taken in fp32).
        flush_subnormals: fp32 operations outside the matrix unit may take subnormal operands for zero and
            store zero for subnormal results (CUDA code built with ``-ftz=true`` or ``--use_fast_math``).
    """

    input_format: Format
    output_format: Format
    probability_format: Format
    input_scale: InputScale = "none"
    product_format: Format | None = None
    score_format: Format | None = None
    score_scale: float = 1.0
    probability_scale: float = 1.0
    probability_scale_placement: ProbabilityScalePlacement = "product"
    grad_score_format: Format | None = None
    lse_format: Format = FP32
    block_keys: int | None = None
    order: Order = "unknown"
    row_sum: RowSum = "unrounded"
    normalise: Normalise = "after_product"
    scale_placement: ScalePlacement = "exponent_fma"
    scale_roundings: int = 1
    score_roundings: int = 0
    scaled_score_format: Format | None = None
    exp_error: float | None = None
    exp_flush: float | None = None
    rescale_threshold: float = 0.0
    sink_position: SinkPosition = "last"
    splits: int = 1
    atomic_dq: bool = False
    grad_accumulator_format: Format | None = None
    block_queries: int | None = None
    group_grad_format: Format | None = None
    grad_probability_format: Format | None = None
    scaled_grad_score_format: Format | None = None
    backward_exp_error: float | None = None
    backward_exp_flush: float | None = None
    backward_probability: BackwardProbability = "as_normalised"
    grad_score_probability: GradScoreProbability = "unrounded"
    delta_format: Format | None = None
    flush_subnormals: bool = False

    def __post_init__(self) -> None:
        for name, choices in _CHOICES.items():
            value = getattr(self, name)
            if value not in choices:
                raise UnknownNameError(f"Arithmetic.{name}", str(value), choices)
        for name in ("score_scale", "probability_scale"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise ArgumentError(f"Arithmetic.{name}", value, "a positive finite number")
        if self.probability_scale_placement == "exponent":
            self._check_lift()
        for name in ("block_keys", "block_queries"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ArgumentError(f"Arithmetic.{name}", value, "a positive integer or None")
        for name in ("scale_roundings", "score_roundings"):
            if getattr(self, name) < 0:
                raise ArgumentError(f"Arithmetic.{name}", getattr(self, name), "an integer >= 0")
        if self.splits < 1:
            raise ArgumentError("Arithmetic.splits", self.splits, "an integer >= 1")
        if not 0 <= self.rescale_threshold < 16:
            raise ArgumentError(
                "Arithmetic.rescale_threshold", self.rescale_threshold, "0 <= log2 units < 16"
            )
        for name in ("exp_error", "backward_exp_error"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < 2.0**-3:
                raise ArgumentError(f"Arithmetic.{name}", value, "0 <= relative error < 1/8")
        for name in ("exp_flush", "backward_exp_flush"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < 1:
                raise ArgumentError(f"Arithmetic.{name}", value, "0 <= limit < 1")

    def _check_lift(self) -> None:
        if not is_power_of_two(self.probability_scale) or self.probability_scale < 1:
            legal = "a power of two, at least 1, where probability_scale_placement is 'exponent'"
            raise ArgumentError("Arithmetic.probability_scale", self.probability_scale, legal)
        if self.scale_placement != "exponent_fma" or self.normalise != "after_product":
            legal = "'product' but for scale_placement 'exponent_fma' and normalise 'after_product'"
            raise ArgumentError("Arithmetic.probability_scale_placement", "exponent", legal)

    @property
    def lifted(self) -> float:
        """Factor of weights and row sum: the probability scale where the exponent carries it, else 1."""
        return self.probability_scale if self.probability_scale_placement == "exponent" else 1.0

    @property
    def lift(self) -> float:
        """ln of ``lifted``."""
        return math.log(self.lifted)

    @property
    def tiling_known(self) -> bool:
        """True where tile size and order are declared, which the centred bound needs."""
        return self.block_keys is not None and self.order != "unknown"

    @property
    def keeps_probabilities(self) -> bool:
        """The backward reads the forward's own P, and nothing of a stored output or log-sum-exp."""
        if self.backward_probability == "as_normalised":
            return self.normalise == "before_product"
        return self.backward_probability == "kept"

    @property
    def grad_operand_format(self) -> Format:
        """The format in which dS enters the products for dQ and dK."""
        return self.scaled_grad_score_format or self.grad_score_format or self.probability_format

    def on(self, machine: Machine) -> Machine:
        """The machine as this kernel uses it."""
        if not self.flush_subnormals or machine.vector.flush_subnormals:
            return machine
        vector = replace(machine.vector, flush_subnormals=True)
        return replace(machine, vector=vector, exp_flush=max(machine.exp_flush, 2.0**-126))

    @property
    def in_backward(self) -> Arithmetic:
        """The arithmetic of the backward: its own exponential in the place of the forward's."""
        if self.backward_exp_error is None and self.backward_exp_flush is None:
            return self
        error, flush = self.backward_exp_error, self.backward_exp_flush
        return replace(
            self,
            exp_error=self.exp_error if error is None else error,
            exp_flush=self.exp_flush if flush is None else flush,
        )

    def describe(self) -> dict[str, object]:
        """The declaration as plain JSON data."""
        return {
            f.name: value.name if isinstance(value := getattr(self, f.name), Format) else value
            for f in fields(self)
        }


def arithmetic_from(data: dict[str, object]) -> Arithmetic:
    """An Arithmetic from plain data (format names for formats), as kernels declare it.

    Raises ArgumentError for a missing or unknown key, UnknownNameError for an unknown format.
    """
    known = {f.name for f in fields(Arithmetic)}
    for key in data:
        if key not in known:
            raise UnknownNameError("arithmetic key", key, known)
    converted = {
        key: format_named(value) if key.endswith("_format") and isinstance(value, str) else value
        for key, value in data.items()
    }
    try:
        return Arithmetic(**converted)  # type: ignore[arg-type]
    except TypeError as error:
        raise ArgumentError("arithmetic", sorted(data), f"all required keys ({error})") from None


def flash(fmt: Format, **changes: object) -> Arithmetic:
    """The usual flash attention: P in the input format, fp32 statistics, tiling unknown."""
    base = Arithmetic(input_format=fmt, output_format=fmt, probability_format=fmt)
    return replace(base, **changes)  # type: ignore[arg-type]


def eager_fp32(fmt: Format, **changes: object) -> Arithmetic:
    """Eager math in fp32: inputs are widened, P is normalised and stays fp32, the output is rounded."""
    base = Arithmetic(
        input_format=fmt,
        output_format=fmt,
        probability_format=FP32,
        product_format=FP32,
        normalise="before_product",
        scale_placement="operands",
        scale_roundings=2,
    )
    return replace(base, **changes)  # type: ignore[arg-type]


ARITHMETICS: dict[str, Arithmetic] = {
    "flash.fp16": flash(FP16),
    "flash.bf16": flash(BF16),
    "flash.fp32": flash(FP32),
    "flash.e4m3": replace(flash(E4M3), output_format=BF16, probability_scale=256.0),
    "flash.e4m3.lifted": replace(
        flash(E4M3, probability_scale=256.0, probability_scale_placement="exponent"), output_format=BF16
    ),
    "flash.e5m2": replace(flash(E5M2), output_format=BF16),
    "eager.fp16": eager_fp32(FP16),
    "eager.bf16": eager_fp32(BF16),
    "eager.fp32": eager_fp32(FP32),
}
"""Named presets: what ships today."""


@dataclass(frozen=True, slots=True)
class Accumulator:
    """How a unit adds products: THEORY.md section 2.3.

    Attributes:
        block: products added in one step (1: every product is added with its own rounding).
        fraction_bits: bits F kept after aligning the addends of a step to the largest one (None:
            no alignment loss).
        precision: significand bits of the running sum.
        rounding: of the running sum, after each step.
        flush_subnormals: subnormal operands (of their own format), products and sums may be replaced by zero.
    """

    block: int = 1
    fraction_bits: int | None = None
    precision: int = 24
    rounding: Rounding = "nearest"
    flush_subnormals: bool = False

    def __post_init__(self) -> None:
        if self.block < 1:
            raise ArgumentError("Accumulator.block", self.block, "a positive integer")
        if self.rounding not in ("nearest", "toward_zero"):
            raise UnknownNameError("Accumulator.rounding", self.rounding, ("nearest", "toward_zero"))

    @property
    def step_error(self) -> float:
        """Relative error of storing the running sum once."""
        return 2.0**-self.precision if self.rounding == "nearest" else 2.0 ** (1 - self.precision)

    def gamma(self, terms: int, tile: int | None = None, runs: int = 1) -> float:
        """gamma with |computed - sum a_k b_k| <= gamma * sum |a_k b_k|, for any order of the terms.

        Rounding to nearest, any order: n u (Jeannerod & Rump 2013; Lange & Rump 2017). Block units:
        every step loses at most (K + 1) 2^-F by alignment and one storing error (THEORY.md 2.3).

        Args:
            terms: products in all.
            tile: products after which a new step begins, full or not; None: after all.
            runs: equal parts of the terms, such as the heads of a group, each cut into tiles of its own.
        """
        if terms <= 0:
            return 0.0
        steps = -(-terms // self.block)
        most = steps * (self.alignment + self.step_error)
        if self.fraction_bits is not None and tile is not None:
            full, rest = divmod(terms // runs, tile)
            steps = runs * (full * -(-tile // self.block) + -(-rest // self.block))
            most = max(most, (terms + steps) * 2.0**-self.fraction_bits + steps * self.step_error)
        return most * (1 + 2.0**-20)

    @property
    def alignment(self) -> float:
        """Share of the largest addend that aligning the addends of one step can lose; 0 without alignment."""
        return 0.0 if self.fraction_bits is None else (self.block + 1) * 2.0**-self.fraction_bits

    def floor(self, terms: int) -> float:
        """What sums of ``terms`` products lose where products or sums are subnormal in fp32.

        2^-149 for each product, or 2^-126 for the product and for the sum where they are flushed; a step of
        a block unit takes a sum under 2^-126 as if it were 2^-126.
        """
        lost = terms * (2.0**-125 if self.flush_subnormals else 2.0**-149)
        if self.fraction_bits is None and self.precision >= 24:
            return lost
        return lost + -(-terms // self.block) * (self.alignment + self.step_error) * 2.0**-126


IEEE_FP32 = Accumulator()
HOPPER_16BIT = Accumulator(block=16, fraction_bits=25, precision=24, rounding="toward_zero")
HOPPER_TF32 = Accumulator(block=8, fraction_bits=25, precision=24, rounding="toward_zero")
HOPPER_FP8 = Accumulator(block=32, fraction_bits=13, precision=14, rounding="toward_zero")


@dataclass(frozen=True, slots=True)
class Machine:
    """How the hardware (or interpreter) computes what an Arithmetic leaves open.

    Attributes:
        name: for certificates.
        accumulators: matrix unit by the name of its operand format; others use ``vector``.
        vector: fp32 additions outside the matrix unit (row sums, rescaling).
        exp_error: relative error of exp2 or exp on a fp32 argument.
        exp_flush: results of the exponential below this may be zero.
        division_error: relative error of dividing by the row sum (a reciprocal and a product included).
        log_absolute, log_relative: error of the natural logarithm: the larger of the two applies.
        tanh_error: absolute error of tanh.
        fused_multiply_add: a * b - c in the exponent is rounded once.
    """

    name: str
    accumulators: dict[str, Accumulator] = field(default_factory=dict)
    vector: Accumulator = IEEE_FP32
    exp_error: float = 2.0 * 2.0**-23
    exp_flush: float = 2.0**-126
    division_error: float = 2.0 * 2.0**-24 * (1 + 2.0**-20)
    log_absolute: float = 2.0**-23
    log_relative: float = 2.0 * 2.0**-23
    tanh_error: float = 2.0 * 2.0**-24
    fused_multiply_add: bool = False

    def accumulator(self, operand_format: Format) -> Accumulator:
        """The unit that multiplies operands of this format."""
        return self.accumulators.get(operand_format.name, self.vector)

    def describe(self) -> dict[str, object]:
        """The model as plain JSON data."""
        out: dict[str, object] = {}
        for f in fields(self):
            value = getattr(self, f.name)
            if isinstance(value, Accumulator):
                value = _accumulator_data(value)
            elif isinstance(value, dict):
                value = {k: _accumulator_data(v) for k, v in value.items()}
            out[f.name] = value
        return out


def _accumulator_data(a: Accumulator) -> dict[str, object]:
    return {f.name: getattr(a, f.name) for f in fields(a)}


IEEE = Machine("ieee")
"""A CPU: fp32 additions to nearest in any order, libm-grade functions (at most 2 ulp)."""

INTERPRETER = Machine("triton-interpreter")
"""Triton's interpreter with its arithmetic repaired: numpy fp32, any order of summation."""

HOPPER = Machine(
    "hopper",
    accumulators={
        "fp16": HOPPER_16BIT,
        "bf16": HOPPER_16BIT,
        "tf32": HOPPER_TF32,
        "e4m3": HOPPER_FP8,
        "e5m2": HOPPER_FP8,
    },
    exp_error=2.5 * 2.0**-23,
    division_error=3.0 * 2.0**-23,
    log_absolute=2.0**-21,
    log_relative=3.5 * 2.0**-23,
    tanh_error=2.0**-11,
    fused_multiply_add=True,
)
"""H100/H200: wgmma truncates its sums (design facts; MMA-Sim), special functions from the PTX ISA."""


def flushing(machine: Machine, formats: Iterable[str]) -> Machine:
    """``machine`` with matrix units that flush subnormal numbers for operands of these formats."""
    names = sorted(formats)
    if not names:
        return machine
    units = {n: replace(machine.accumulators.get(n, machine.vector), flush_subnormals=True) for n in names}
    name = f"{machine.name}, {' and '.join(names)} products flush"
    return replace(machine, name=name, accumulators={**machine.accumulators, **units})


MACHINES = {m.name: m for m in (IEEE, INTERPRETER, HOPPER)}
