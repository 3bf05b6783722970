"""The ratio of two sums over rows of many problems, and its standard error.

Elements of a row share errors, and rows of a problem share inputs, so neither are independent: the error is
taken from whole rows and once more from whole problems, and the larger one counts.
"""

from __future__ import annotations

import math

from torch import Tensor

Squares = tuple[float, float, float]
"""Sums of x x, x y and y y over independent pairs (x, y)."""


def of_rows(x: Tensor, y: Tensor) -> Squares:
    """Every row is a pair."""
    return float(x.square().sum()), float((x * y).sum()), float(y.square().sum())


def of_problem(x: float, y: float) -> Squares:
    """The whole problem is one pair, of its sums."""
    return x * x, x * y, y * y


def plus(a: Squares, b: Squares) -> Squares:
    return a[0] + b[0], a[1] + b[1], a[2] + b[2]


def standard_error(above: float, below: float, *squares: Squares) -> float:
    """Of above / below (delta method); inf where nothing was added."""
    if below <= 0:
        return math.inf
    ratio = above / below
    variances = [xx - 2 * ratio * xy + ratio * ratio * yy for xx, xy, yy in squares]
    return math.sqrt(max(0.0, *variances)) / below
