"""Rounding into every format against ml_dtypes: every code, every tie, both sides of every tie."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch

from flashcheck.formats import (
    BF16,
    E4M3,
    E5M2,
    FP16,
    FP32,
    FP64,
    Format,
    half_ulp,
    is_representable,
    round_nearest,
    round_toward_zero,
    ulp,
)

NUMPY = {
    "fp16": np.float16,
    "bf16": ml_dtypes.bfloat16,
    "e4m3": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
}
NARROW = [FP16, BF16, E4M3, E5M2]


def every_finite_value(fmt: Format) -> np.ndarray:
    """Every finite value of the format, ascending, one zero."""
    kind = np.dtype(NUMPY[fmt.name])
    codes = np.arange(2 ** (8 * kind.itemsize), dtype=np.uint16 if kind.itemsize == 2 else np.uint8)
    with np.errstate(invalid="ignore"):  # signalling NaN codes
        values = codes.view(kind).astype(np.float64)
    return np.unique(values[np.isfinite(values)])


@pytest.mark.parametrize("fmt", NARROW, ids=str)
def test_every_value_is_a_fixed_point(fmt: Format) -> None:
    values = torch.from_numpy(every_finite_value(fmt))
    assert torch.equal(round_nearest(values, fmt), values)
    assert torch.equal(round_toward_zero(values, fmt), values)
    assert bool(is_representable(values, fmt).all())
    assert float(values.max()) == fmt.max_finite
    assert float(values[values > 0].min()) == fmt.quantum


@pytest.mark.parametrize("fmt", NARROW, ids=str)
def test_ties_and_their_neighbours_agree_with_ml_dtypes(fmt: Format) -> None:
    values = every_finite_value(fmt)
    ties = (values[:-1] + values[1:]) / 2
    points = np.concatenate([ties, np.nextafter(ties, np.inf), np.nextafter(ties, -np.inf)])
    expected = _by_neighbours(points, values, fmt)
    got = round_nearest(torch.from_numpy(points), fmt).numpy()
    assert np.array_equal(got, expected)
    # ml_dtypes converts from fp32; where fp32 holds the point, both must agree.
    held = points.astype(np.float32).astype(np.float64) == points
    with np.errstate(over="ignore"):
        other = points[held].astype(np.float32).astype(NUMPY[fmt.name]).astype(np.float64)
    assert np.array_equal(got[held], other)


def _by_neighbours(points: np.ndarray, values: np.ndarray, fmt: Format) -> np.ndarray:
    """Nearest value, ties to the even code, by search in the table of all values."""
    above = np.clip(np.searchsorted(values, points, "right"), 1, len(values) - 1)
    low, high = values[above - 1], values[above]
    kind = NUMPY[fmt.name]
    bits = np.uint16 if np.dtype(kind).itemsize == 2 else np.uint8
    even = (low.astype(kind).view(bits) & 1) == 0
    down = (points - low < high - points) | ((points - low == high - points) & even)
    return np.where(down, low, high)


@pytest.mark.parametrize("fmt", NARROW, ids=str)
def test_overflow(fmt: Format) -> None:
    edge = fmt.overflow_threshold
    inside = torch.tensor([np.nextafter(edge, 0.0), -np.nextafter(edge, 0.0)], dtype=torch.float64)
    assert round_nearest(inside, fmt).tolist() == [fmt.max_finite, -fmt.max_finite]
    past = torch.tensor([edge * 1.01, -edge * 1.01, torch.inf], dtype=torch.float64)
    top = fmt.max_finite if fmt.saturates else torch.inf
    assert round_nearest(past, fmt).tolist() == [top, -top, top]
    assert torch.isnan(round_nearest(torch.tensor([torch.nan], dtype=torch.float64), fmt)).all()
    truncated = round_toward_zero(past[:2], fmt)
    assert truncated.tolist() == [fmt.max_finite, -fmt.max_finite]


def test_fp32_agrees_with_numpy() -> None:
    generator = np.random.default_rng(0)
    x = generator.standard_normal(20000) * 2.0 ** generator.integers(-160, 127, 20000)
    assert np.array_equal(
        round_nearest(torch.from_numpy(x), FP32).numpy(), x.astype(np.float32).astype(float)
    )
    assert torch.equal(round_nearest(torch.from_numpy(x), FP64), torch.from_numpy(x))


@pytest.mark.parametrize("fmt", [FP32, *NARROW], ids=str)
def test_spacing_is_the_distance_to_the_next_value(fmt: Format) -> None:
    if fmt is FP32:
        values = np.float32([1.0, 1.5, 2.0, 3e38, 1e-40, 0.0]).astype(np.float64)
        following = np.nextafter(values.astype(np.float32), np.float32(np.inf)).astype(np.float64)
    else:
        every = every_finite_value(fmt)
        every = every[every >= 0]
        values, following = every[:-1], every[1:]
    got = ulp(torch.from_numpy(values), fmt).numpy()
    assert np.array_equal(got, following - values)
    assert torch.equal(half_ulp(torch.from_numpy(values), fmt) * 2, torch.from_numpy(got))
