"""What units lose on subnormal operands: by flushing them, or by aligning them as if they were normal.
THEORY.md section 2.3."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from flashcheck.arithmetic import Accumulator, Arithmetic
from flashcheck.bounds.products import weighted
from flashcheck.bounds.rows import SoftmaxRows
from flashcheck.formats import Format


@dataclass(frozen=True, slots=True)
class Operand:
    """Magnitudes of one operand of a product, and where its format ends.

    Attributes:
        most, least: limits on the magnitude of what is stored, of one shape; ``least`` may be negative.
        smallest: the smallest normal number, quantum: the smallest number, in the units of ``most``;
            floats, or tensors that broadcast.
    """

    most: Tensor
    least: Tensor
    smallest: Tensor | float
    quantum: Tensor | float


def operand(most: Tensor, fmt: Format, *, least: Tensor | None = None, unit: Tensor | float = 1.0) -> Operand:
    """Magnitudes up to ``most`` (known exactly without ``least``) of values of ``fmt`` times ``unit``."""
    least = most if least is None else least
    return Operand(most, least, unit * 2.0**fmt.min_exponent, unit * fmt.quantum)


def subnormal_error(
    unit: Accumulator, left: Operand, right: Operand, product: Callable[[Tensor, Tensor], Tensor]
) -> Tensor | float:
    """Loss beyond ``unit.gamma`` of left @ right where operands are subnormal; 0 where none is.

    A block unit aligns them as if their exponent were emin; a unit that flushes may take them for 0.

    Args:
        product: at least left @ right for two non-negative factors, shaped as the operands.
    """
    lost, flushes = unit.alignment, unit.flush_subnormals
    if not (lost or flushes):
        return 0.0
    # A value that rounds to 0 takes no part; 1 + 2^-10 for roundings on the way to the format.
    present = left.most * (2 + 2.0**-9) >= left.quantum
    low = present & (left.least < left.smallest)
    right_low = (right.most > 0) & (right.least < right.smallest)
    total: Tensor | float = 0.0
    if bool(low.any()):
        largest = torch.where(right.most > 0, right.most.clamp(min=right.smallest), 0.0)
        total = product(low.double() * (lost * left.smallest), largest)
        if flushes:
            total = total + product(low * _at_most(left.most, left.smallest), right.most)
    if bool(right_low.any()):
        raised = torch.where(present, left.most.clamp(min=left.smallest), 0.0)
        total = total + product(raised, right_low.double() * (lost * right.smallest))
        if flushes:
            total = total + product(left.most, right_low * _at_most(right.most, right.smallest))
    return total


def _at_most(x: Tensor, limit: Tensor | float) -> Tensor:
    """min(x, limit), elementwise."""
    return torch.minimum(x, limit) if isinstance(limit, Tensor) else x.clamp(max=limit)


def subnormal_values(
    rows: SoftmaxRows, shares: Tensor, scaled: Tensor, unit: Accumulator, steps: float, arithmetic: Arithmetic
) -> Tensor | float:
    """The same of P V, (B, H, Nq, dv), in units of the output; any P may be subnormal.

    Args:
        shares: (B, H, Nq, n) limits on the computed weights as shares of the row.
        scaled: (B, H, Nq, 1) what P is multiplied by against its share.
        steps: of the unit, for a row.
    """
    if not (unit.alignment or unit.flush_subnormals) or not rows.num_keys:
        return 0.0
    p_format = arithmetic.product_format or arithmetic.probability_format
    v_format = arithmetic.product_format or arithmetic.input_format
    values = rows.sizes
    smallest = 2.0**v_format.min_exponent * rows.problem.v_descale
    smallest_p = 2.0**p_format.min_exponent / scaled
    most = values.amax(-2, keepdim=True).repeat_interleave(rows.problem.group, 1)
    error: Tensor = torch.where(most > 0, most.clamp(min=smallest), 0.0) * (
        steps * unit.alignment * smallest_p
    )
    low = (values > 0) & (values < smallest)
    if bool(low.any()):
        raised = rows.hide(torch.maximum(shares, smallest_p))
        error = error + weighted(rows.problem, raised, low.double() * (unit.alignment * smallest))
    if unit.flush_subnormals:
        error = error + weighted(rows.problem, torch.minimum(shares, smallest_p), values)
        if bool(low.any()):
            error = error + weighted(rows.problem, shares, values * low)
    return error
