"""Score tests: is the error of the output aligned with the mark that one fault leaves? THEORY.md section 9.

The worst-case bound lets a scale pass that is wrong by 1e-4, and the rms ratio hardly moves; but such an
error points, in every element, along a direction H that the oracle knows. With the elements weighted by
their predicted variance, sum(W e) / sum(W H), W = H / variance, is the best estimate of how much of H the
error e holds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from flashcheck.arithmetic import Arithmetic, Machine
from flashcheck.bounds import rms
from flashcheck.bounds.accumulation import accumulation_bias
from flashcheck.bounds.alike import alike_weights, summed_variance
from flashcheck.bounds.copies import distinct_rows
from flashcheck.bounds.numbers import UNIT
from flashcheck.bounds.result import ForwardBound
from flashcheck.bounds.stored import Stored, stored
from flashcheck.bounds.weights import WeightErrors
from flashcheck.formats import half_ulp
from flashcheck.oracle.quantities import ForwardQuantities

DIRECTIONS = ("scale", "cast")

_SOLVED, _HELD = 1 << 30, 1 << 22
"""Products that the covariances of one problem's rows may cost, and elements that are held at once."""


@dataclass(frozen=True, slots=True)
class ScoreSums:
    """Sums over the elements of one problem for one direction H, W = H / variance.

    Attributes:
        projection: sum W e. information: sum W H, so that projection / information estimates the amount
            of H in e. variance: of the projection, for a kernel that follows its declaration.
        allowance: largest |projection| that errors which the declaration allows, and which need not
            average out, can add.
        elements: how many entered.
    """

    projection: float
    information: float
    variance: float
    allowance: float
    elements: int


def score_sums(
    exact: ForwardQuantities, got: Tensor, bound: ForwardBound, arithmetic: Arithmetic, machine: Machine
) -> dict[str, ScoreSums]:
    """Sums for ``scale`` (H: derivative of the output by the logarithm of the scale; amount 1e-4:
    the scale is 1e-4 too large) and ``cast`` (H: what truncating P in place of rounding it adds on average;
    amount 1: truncated). Directions that the problem does not determine are left out.

    Args:
        exact: the oracle's quantities; bound: made of them, whose weights and variance are used again.
        got: the kernel's output, (B, H, Nq, dv).

    Source: THEORY.md section 9.
    """
    weights = bound.weights
    if weights is None or bound.variance is None or not exact.products.shape[-1]:
        return {}
    machine, rows = arithmetic.on(machine), weights.rows
    problem, variance = rows.problem, bound.variance()
    fmt = arithmetic.output_format
    noise = variance + half_ulp(rows.out, fmt).square() / 3
    kept = stored(rows.out, variance, fmt)
    error = got.double() - kept.mean
    linear = rows.live & rms.first_order(weights)
    used = linear & torch.isfinite(error) & torch.isfinite(noise) & (noise.sqrt() >= fmt.quantum / 4)
    used = used & distinct_rows(got, rows.out).unsqueeze(-1)
    # Weights within one spacing of each other are all stored as one number, as if the scale were 0.
    used = used & ~alike_weights(exact, arithmetic.probability_format)
    if not bool(used.any()):
        return {}
    values = rows.values.repeat_interleave(problem.group, 1)
    # As if the tiling were unknown: the test is for kernels whose roundings of P are not predicted.
    unknown = replace(weights, tiling=replace(weights.tiling, running_max=None))
    _, rounding = rms._probability_rounding(unknown, arithmetic)
    directions = {}
    if problem.softcap is None and problem.bias is None and problem.alibi_slopes is None:
        log_weight = -rows.p * rows.gap  # a shift common to a row drops out
        if rows.has_sink:  # the sink does not scale with the scores
            log_weight[..., -1] = (-rows.p * rows.row_max)[..., -1]
        directions["scale"] = log_weight @ values - rows.out * log_weight.sum(-1, keepdim=True)
    if rounding is not None and arithmetic.probability_format.precision >= 8:
        mean = -(3 * rounding).sqrt()
        shift = rows.out * mean.sum(-1, keepdim=True) if arithmetic.row_sum == "rounded" else 0.0
        directions["cast"] = mean @ values - shift
    if rounding is None:
        rounding = torch.zeros_like(rows.p)
    sums = {}
    for name, direction in directions.items():
        # Roundings of P that repeat from row to row are what the cast is asked for, and those of 8-bit
        # formats are few and large: no weights that lean on their independence.
        solve = name == "scale" and arithmetic.probability_format.precision >= 8
        found = _sums(direction, error, kept, used, rounding, values, weights, arithmetic, machine, solve)
        if found is not None:
            sums[name] = found
    return sums


def _coherent(weights: WeightErrors, arithmetic: Arithmetic, machine: Machine) -> Tensor:
    """The part of each weight's relative error that may have the same sign everywhere: errors of the
    exponential, of the constant, and of products that are truncated toward zero. Roundings to nearest are
    part of the variance."""
    rows = weights.rows
    unit = machine.accumulator(arithmetic.product_format or arithmetic.input_format)
    if unit.precision < 24 or (unit.fraction_bits is not None and unit.fraction_bits < 24):
        return weights.relative
    steps = -(-rows.problem.head_dim // unit.block)
    toward_zero = 0.0 if unit.rounding == "nearest" else steps * unit.step_error
    if unit.fraction_bits is not None:
        toward_zero += (unit.block + 1) * 2.0**-unit.fraction_bits
    constant = arithmetic.scale_roundings * UNIT * rows.gap
    return (
        weights.exp_error * (1 + weights.rescales) + constant + toward_zero * (rows.row_max - rows.gap).abs()
    )


def _weighting(
    direction: Tensor,
    rounding: Tensor,
    values: Tensor,
    centre: Tensor,
    slope: Tensor,
    shared: Tensor,
    own: Tensor,
    used: Tensor,
) -> Tensor:
    """C^-1 G H of each row, C = G sum_j v_ij (V_j - centre)(V_j - centre)^T G + diag(own) the covariance of
    what is stored, G = diag(slope), ``shared`` the diagonal of its sum: the best weights there are. Rows past
    _SOLVED products get (G H / variance) times the best factor for a row."""
    batch, heads, queries, dim = direction.shape
    shown = direction * slope
    weighting = torch.where(used, shown / (own + shared), 0.0)
    moved = (weighting * slope) @ values.mT - (weighting * slope * centre).sum(-1, keepdim=True)
    spread = (rounding * moved.square()).sum(-1) + (weighting.square() * own).sum(-1)
    factor = ((weighting * shown).sum(-1) / spread).nan_to_num(0.0, 0.0)
    weighting = weighting * factor.unsqueeze(-1)
    held = max(batch * heads * dim * max(rounding.shape[-1], dim), 1)  # elements for one query of each head
    solved, step = min(queries, _SOLVED // (held * dim)), max(_HELD // held, 1)
    for first in range(0, solved, step):
        part = (slice(None), slice(None), slice(first, min(first + step, solved)))
        rows = (x[part] for x in (shown, rounding, centre, slope, own, used))
        best = _solved(values, *rows)
        fine = torch.isfinite(best).all(-1, keepdim=True)
        weighting[part] = torch.where(fine, best, weighting[part])
    return weighting


def _solved(
    values: Tensor, shown: Tensor, rounding: Tensor, centre: Tensor, slope: Tensor, own: Tensor, used: Tensor
) -> Tensor:
    """C^-1 G H of some rows; NaN where C is not positive definite to float64."""
    size, seen = own.sqrt(), used.double()
    # In units of each element's own deviation: the unit matrix and something positive more.
    scaled = (values.unsqueeze(2) - centre.unsqueeze(3)) * (slope * seen / size).unsqueeze(3)
    covariance = (scaled * rounding.unsqueeze(-1)).mT @ scaled
    covariance.diagonal(dim1=-2, dim2=-1).add_(1.0)
    factors, failed = torch.linalg.cholesky_ex(covariance)
    best = torch.cholesky_solve((shown / size).unsqueeze(-1), factors).squeeze(-1) / size * seen
    return torch.where((failed == 0).unsqueeze(-1), best, torch.nan)


def _sums(
    direction: Tensor,
    error: Tensor,
    kept: Stored,
    used: Tensor,
    rounding: Tensor,
    values: Tensor,
    weights: WeightErrors,
    arithmetic: Arithmetic,
    machine: Machine,
    solve: bool,
) -> ScoreSums | None:
    rows = weights.rows
    direction = torch.where(used, direction, 0.0)
    slope = kept.slope
    # Elements of a row share the errors of P, so their covariance counts; what else there is is independent.
    shared = slope.square() * (rounding @ values.square())
    # Never below the half of what rounding would add as noise: a prediction is not known better than that.
    least = half_ulp(rows.out, arithmetic.output_format).square() / 6
    own = torch.maximum(kept.variance - shared, least)
    centre = rows.out if arithmetic.row_sum == "rounded" else torch.zeros_like(rows.out)
    if solve:
        weighting = _weighting(direction, rounding, values, centre, slope, shared, own, used)
    else:
        weighting = torch.where(used, direction / (own + shared + 2 * least), 0.0)
    largest = float(weighting.abs().max())
    if not (math.isfinite(largest) and largest > 0):
        return None
    before = weighting * slope  # what an error before the last rounding counts
    information = float((before * direction).sum())
    pulled = before @ values.mT
    centred = pulled - (before * rows.out).sum(-1, keepdim=True)
    moved = pulled - (before * centre).sum(-1, keepdim=True)
    log_size = -rows.log_p if arithmetic.normalise == "before_product" else rows.gap
    variance = summed_variance(moved, rounding, log_size) + float((weighting.square() * own).sum())
    coherent = rows.hide(_coherent(weights, arithmetic, machine))
    allowance = float((rows.p * coherent * centred.abs()).sum())
    unit = machine.accumulator(arithmetic.product_format or arithmetic.probability_format)
    drift = accumulation_bias(unit, rows.num_keys, rows.out)
    allowance += abs(float((before * drift).sum()))
    # Problems add: each counts by what it tells, information over variance.
    factor = information / variance if variance > 0 and information > 0 else 1.0
    return ScoreSums(
        projection=factor * float((weighting * torch.where(used, error, 0.0)).sum()),
        information=factor * information,
        variance=factor**2 * variance,
        allowance=factor * allowance,
        elements=int(used.sum()),
    )
