"""Experiments on a matrix unit: crafted sums whose result tells how the unit adds.

Model (bounds/THEORY.md 2.3): K products and the accumulator are aligned to the largest, truncated to F
fraction bits, added exactly, and the sum is stored with p significand bits. With 1 for the largest:

* 1 + 2^-j is stored while j <= p - 1; 1 + 1.5 * 2^-(p-1) tells the rounding;
* 1 + 2^-j - 1, all three in one step, leaves 2^-j while j <= F;
* 1 + 0.75 * 2^-F - 1 leaves 2^-F where each addition is rounded to nearest, 0 where addends are truncated;
* 2^(F+2-p) addends of 2^-(F+1) are lost in the step that holds the 1, and add up to the last stored bit in
  a step before it: the least distance between them and the 1 that saves them is K.

The model found is then run on random sums (``emulator.units``) and compared bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from flashcheck.arithmetic import Accumulator, Rounding
from flashcheck.emulator.units import multiply_add
from flashcheck.flushing import kept_by_matmul
from flashcheck.formats import FP32, Format, round_nearest
from flashcheck.probe.findings import ProductFinding
from flashcheck.probe.units import Unit

_LARGEST_J = 27
TF32 = Format("tf32", 11, -126, FP32.max_finite, False, torch.float32)
_RANDOM_TILES = 1


@dataclass(slots=True)
class Sums:
    """Sums to be made on a unit: each is c + sum of a_k b_k, read off the diagonal of a tile."""

    unit: Unit
    names: list[object] = field(default_factory=list)
    starts: list[float] = field(default_factory=list)
    terms: list[dict[int, tuple[float, float]]] = field(default_factory=list)

    def ask(self, name: object, start: float, *products: float, at: dict[int, float] | None = None) -> None:
        """A sum: products at positions 0, 1, 2, ... and at the positions of ``at``."""
        placed = dict(enumerate(products)) | (at or {})
        self.names.append(name)
        self.starts.append(start)
        self.terms.append({k: split(x, self.unit.operands) for k, x in placed.items()})

    def ask_factors(self, name: object, start: float, a: float, b: float) -> None:
        """A sum of one product a b, the factors as given."""
        self.names.append(name)
        self.starts.append(start)
        self.terms.append({0: (a, b)})

    def answers(self, device: torch.device) -> dict[object, float]:
        unit = self.unit
        size = min(unit.rows, unit.columns)
        tiles = -(-len(self.names) // size)
        a = torch.zeros(tiles, unit.rows, unit.inner, dtype=torch.float64)
        b = torch.zeros(tiles, unit.inner, unit.columns, dtype=torch.float64)
        c = torch.zeros(tiles, unit.rows, dtype=torch.float64)
        for i, (start, terms) in enumerate(zip(self.starts, self.terms, strict=True)):
            tile, place = divmod(i, size)
            c[tile, place] = start
            for k, (x, y) in terms.items():
                a[tile, place, k], b[tile, k, place] = x, y
        out = unit.multiply_add(a, b, c, device)
        return {name: float(out[i // size, i % size, i % size]) for i, name in enumerate(self.names)}


def split(product: float, fmt: Format) -> tuple[float, float]:
    """Two normal numbers of ``fmt`` with this product, the significand in the first."""
    if product == 0:
        return 0.0, 0.0
    significand, exponent = torch.frexp(torch.tensor(product, dtype=torch.float64))
    total = int(exponent) - 1
    half = max(total // 2, fmt.min_exponent)
    return 2 * float(significand) * 2.0**half, 2.0 ** (total - half)


def measure_products(unit: Unit, device: torch.device) -> ProductFinding:
    """What ``unit`` does; a unit that cannot run here gives a finding that says why."""
    try:
        return _measure(unit, device)
    except Exception as error:  # a compiler, a driver or the interpreter may refuse in any way
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        return _finding(unit, failed=reason)


def measure_subnormals(fmt: Format) -> ProductFinding:
    """What torch's product of two matrices of ``fmt`` on the CPU does to subnormal numbers. It stores its
    result in ``fmt`` as well, so no crafted sum can tell how it adds.

    ``kernel.machine_for`` makes the same measurement. It contradicts no other declared machine: a kernel
    that multiplies by itself, as emulators do, does not depend on it.
    """
    operands, results = kept_by_matmul(fmt)
    return ProductFinding(
        unit="torch.matmul",
        operands=fmt.name,
        platform="torch",
        subnormal_operands=_kept(operands),
        subnormal_sums=_kept(results),
    )


def _finding(unit: Unit, **found: Any) -> ProductFinding:
    return ProductFinding(unit=unit.name, operands=unit.operands.name, platform=unit.platform, **found)


def _measure(unit: Unit, device: torch.device) -> ProductFinding:
    fmt = unit.operands
    one = 2.0**14 if fmt.name == "e4m3" else 1.0  # leaves room below for the smallest normal products
    first = Sums(unit)
    for j in range(1, _LARGEST_J + 1):
        x = one * 2.0**-j
        first.ask(("store", j), one, x)
        for sign in (1, -1):
            first.ask(("store 1.5", j, sign), sign * one, sign * 1.5 * x)
        first.ask(("products", j), 0.0, one, x, -one)
        first.ask(("products 0.75", j), 0.0, one, 0.75 * x, -one)
        first.ask(("accumulator", j), one, x, -one)
    for j in range(1, 24):
        if fmt.precision > j:
            first.ask_factors(("operand", j), 0.0, 1 + 2.0**-j, 1.0)
    first.ask_factors("one", one, *split(one, fmt))
    first.ask_factors("subnormal operand", 0.0, fmt.quantum, 1.0)
    first.ask_factors("nan", 0.0, torch.nan, 1.0)
    first.ask("subnormal sum", 2.0**-130, 0.0)
    got = first.answers(device)
    if got["one"] != 2 * one:
        return _finding(unit, wrong=f"{one:g} + {one:g} * 1 gives {got['one']:g}")
    stored = _run(lambda j: got["store", j] > one)
    kept_products = _run(lambda j: got["products", j] == one * 2.0**-j)
    kept_accumulator = _run(lambda j: got["accumulator", j] == one * 2.0**-j)
    operand_bits = 1 + _run(lambda j: got["operand", j] == 1 + 2.0**-j, fmt.precision - 1)
    rounding = _rounding(got, one, stored)
    kept = min(kept_products, kept_accumulator)
    operand_rounding = (
        "exact" if operand_bits >= fmt.precision else _operand_rounding(unit, device, operand_bits)
    )
    if rounding == "nearest" and got["products 0.75", kept_products] == one * 2.0**-kept_products:
        block: int | None = 1
    else:
        block = _block(unit, device, one, stored, kept)
    found = _finding(
        unit,
        operand_bits=operand_bits,
        operand_rounding=operand_rounding,
        sum_bits=stored,
        rounding=rounding,
        kept_bits=kept,
        kept_products=kept_products,
        kept_accumulator=kept_accumulator,
        block=block,
        subnormal_operands=_kept(got["subnormal operand"] == fmt.quantum),
        subnormal_sums=_kept(got["subnormal sum"] == 2.0**-130),
        nan=got["nan"] != got["nan"],
    )
    return _compared(found, unit, device)


def _run(holds: Callable[[int], bool], largest: int = _LARGEST_J) -> int:
    """The largest j such that ``holds`` for 1 .. j."""
    j = 0
    while j < largest and holds(j + 1):
        j += 1
    return j


def _kept(kept: bool) -> str:
    return "kept" if kept else "flushed"


def _rounding(got: dict[object, float], one: float, stored: int) -> str:
    """From 1 + 1.5 spacings, and minus that."""
    if not stored:
        return "unknown"
    spacing = one * 2.0**-stored
    up, down = (got["store 1.5", stored, sign] for sign in (1, -1))
    return {
        (one + 2 * spacing, -one - 2 * spacing): "nearest",
        (one + spacing, -one - spacing): "toward zero",
        (one + spacing, -one - 2 * spacing): "down",
        (one + 2 * spacing, -one - spacing): "up",
    }.get((up, down), "unknown")


def _operand_rounding(unit: Unit, device: torch.device, bits: int) -> str:
    """How an operand with more bits is shortened to ``bits``: from 1.75 spacings, and from the two ties."""
    sums, spacing = Sums(unit), 2.0 ** (1 - bits)
    for share in (0.5, 0.75, 1.5):
        sums.ask_factors(share, 0.0, 1 + share * spacing, 1.0)
    got = sums.answers(device)
    steps = tuple((got[share] - 1) / spacing for share in (0.5, 0.75, 1.5))
    known: dict[tuple[float, ...], str] = {
        (0, 1, 2): "nearest",
        (1, 1, 2): "nearest, ties away",
        (0, 0, 1): "toward zero",
    }
    return known.get(steps, "unknown")


def _block(unit: Unit, device: torch.device, one: float, stored: int, kept: int) -> int | None:
    """Addends per step; None where the steps are not consecutive runs of products."""
    count = 2 ** max(kept + 1 - stored, 0)
    if count >= unit.inner or kept + 1 > _LARGEST_J:
        return None
    small = one * 2.0 ** -(kept + 1)
    sums = Sums(unit)
    for d in range(count, unit.inner):
        sums.ask(d, 0.0, *[small] * count, at={d: one})
    got = sums.answers(device)
    saved = [d for d in range(count, unit.inner) if got[d] > one]
    if not saved:
        return unit.inner
    return saved[0] if saved == list(range(saved[0], unit.inner)) else None


def model_of(found: ProductFinding) -> Accumulator | None:
    """The Accumulator that a finding implies; None where it is not understood."""
    if (
        found.failed
        or found.wrong
        or found.sum_bits is None
        or found.block is None
        or found.kept_bits is None
    ):
        return None
    if found.rounding not in ("nearest", "toward zero"):
        return None
    rounding: Rounding = "nearest" if found.rounding == "nearest" else "toward_zero"
    sequential = found.block == 1 and rounding == "nearest"
    flush = "flushed" in (found.subnormal_operands, found.subnormal_sums)
    return Accumulator(
        block=found.block,
        fraction_bits=None if sequential else found.kept_bits,
        precision=found.sum_bits + 1,
        rounding=rounding,
        flush_subnormals=flush,
    )


def _compared(found: ProductFinding, unit: Unit, device: torch.device) -> ProductFinding:
    """The finding with what random sums say about the model."""
    model = model_of(found)
    if model is None:
        return found
    generator = torch.Generator().manual_seed(20261)

    def draw(*shape: int, fmt: Format) -> Tensor:
        x = torch.randn(shape, generator=generator, dtype=torch.float64)
        wide = torch.exp2(torch.randint(-4, 3, shape, generator=generator).double())
        return round_nearest(x * wide, fmt)

    operands = TF32 if found.operand_bits == TF32.precision else unit.operands
    a = draw(_RANDOM_TILES, unit.rows, unit.inner, fmt=operands)
    b = draw(_RANDOM_TILES, unit.inner, unit.columns, fmt=operands)
    c = draw(_RANDOM_TILES, unit.rows, fmt=FP32)
    if unit.platform == "torch":
        c = torch.zeros_like(c)
    got = unit.multiply_add(a, b, c, device)
    start = c.unsqueeze(-1).expand_as(got)
    exact, size = a @ b + start, a.abs() @ b.abs() + start.abs()
    error = (got - exact).abs() / (model.gamma(unit.inner + 1) * size)
    agree = tested = 0
    if model.block > 1:
        expected = multiply_add(a.float(), b.float(), start.float(), model, unit.operands).double()
        agree, tested = int((expected == got).sum()), got.numel()
    largest = float(error.max())
    wrong = "" if largest <= 1 else f"random sums err by {largest:.3g} x what the rounding found here allows"
    return found.model_copy(
        update={"bits_agree": agree, "bits_tested": tested, "largest_error": largest, "wrong": wrong}
    )
